"""On ``cpu``, which has no memory of its own, a tensor is copied by ``pageable``, whatever was asked for."""

import warnings

import pytest
import torch

from accelerators import get_accelerator
from transfer import build_transfer
from transfer.errors import FallbackWarning, StrategyUnavailableError

CPU = "The CPU accelerator"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, None),
        ({"strategy": "pageable"}, None),
        ({"strategy": "pinned_staged"}, CPU),
        ({"strategy": "pinned_direct"}, CPU),
        ({"strategy": "nvme_swapped"}, None),
    ],
    ids=["default", "pageable", "pinned_staged", "pinned_direct", "nvme_swapped"],
)
def test_what_copies_a_tensor_on_cpu(config, says):
    source, destination = torch.arange(300_000.0), torch.zeros(300_000, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transfer = build_transfer(config, accelerator=get_accelerator("cpu"))
        transfer.prepare(source)
        transfer.copy(destination, source)
        transfer.copy(destination, source)
    assert torch.equal(destination, source.bfloat16())
    copied = {name: stats.copies for name, stats in transfer.stats().items() if stats.copies}
    assert copied == {"pageable": 2}
    messages = [str(each.message) for each in caught if issubclass(each.category, FallbackWarning)]
    assert all(says is not None and says in message for message in messages)
    assert bool(messages) == (says is not None), "a strategy that was asked for and cannot run says so"
    assert transfer.pinned_bytes == 0
    transfer.close()


@pytest.mark.parametrize("strategy", ["pinned_staged", "pinned_direct"])
def test_without_fallback_nothing_is_written_on_cpu(strategy):
    destination = torch.full((300_000,), -77.0)
    transfer = build_transfer({"strategy": strategy, "fallback": False}, accelerator="cpu")
    with pytest.raises(StrategyUnavailableError, match=CPU):
        transfer.copy(destination, torch.arange(300_000.0))
    assert (destination == -77).all()
