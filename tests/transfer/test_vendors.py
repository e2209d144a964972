"""Accelerators that do not answer: copies go on by what needs no answer, or end with one clear error."""

import warnings

import pytest
import torch

from accelerators.deepspeed_adapter import adapt
from accelerators.simulated import SimulatedAccelerator
from transfer import FallbackWarning, StrategyUnavailableError, build_transfer

#: Elements of bf16 for which the policy considers page-locked memory, and for which it stages.
SIZES = (10, 300_000, 600_000)


class DoesNotTell(SimulatedAccelerator):
    """Such as one whose build of torch cannot say what is pinned."""

    def is_pinned(self, tensor):
        raise RuntimeError("this build cannot do that")


class WantsADevice(SimulatedAccelerator):
    """``is_pinned(device)`` of one argument more than ours gives it."""

    def is_pinned(self, tensor, device):  # type: ignore[override]
        raise AssertionError("cannot be reached")


def caught_copies(config, device, prepare):
    """Copies of every size, twice; the warnings, and what each strategy has copied."""
    source = torch.arange(float(SIZES[-1]))
    with warnings.catch_warnings(record=True) as caught, build_transfer(config, device) as transfer:
        warnings.simplefilter("always")
        if prepare:
            transfer.prepare(source)
        for size in SIZES * 2:
            destination = device.device_empty(size, dtype=torch.bfloat16)
            transfer.copy(destination, source[:size])
            assert torch.equal(destination, source[:size].bfloat16())
        stats = {name: counts.copies for name, counts in transfer.stats().items() if counts.copies}
    assert device.pinned_bytes == 0
    return [(warning.category, str(warning.message)) for warning in caught], stats


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("kind", [DoesNotTell, WantsADevice])
def test_copies_go_on_with_one_warning_where_is_pinned_raises(kind, prepare):
    (told,), stats = caught_copies({}, kind(), prepare)
    assert told[0] is FallbackWarning
    assert "pinned_direct" in told[1]
    assert "this build cannot do that" in told[1] or "missing 1 required positional argument" in told[1]
    assert stats == {"pageable": 4, "pinned_staged": 2}


@pytest.mark.parametrize(
    ("strategy", "number", "copied"),
    [("pageable", 0, "pageable"), ("pinned_staged", 0, "pinned_staged"), ("pinned_direct", 1, None)],
)
def test_a_strategy_that_needs_no_answer_is_used_without_a_warning(strategy, number, copied):
    told, stats = caught_copies({"strategy": strategy}, DoesNotTell(), False)
    assert len(told) == number
    assert copied is None or stats == {copied: 6}


def test_without_fallback_the_vendors_error_is_raised_and_nothing_stays():
    device = DoesNotTell()
    with build_transfer({"strategy": "pinned_direct", "fallback": False}, device) as transfer:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="this build cannot do that"):
                transfer.copy(device.device_empty(10, dtype=torch.bfloat16), torch.zeros(10))
            with pytest.raises(RuntimeError, match="this build cannot do that"):
                transfer.prepare(torch.zeros(10))
    assert device.pinned_bytes == 0


def test_events_that_take_arguments_are_a_refusal_before_anything_is_written():
    device = SimulatedAccelerator()
    make = device.Event
    device.Event = lambda stream: make()
    (told,), stats = caught_copies({"strategy": "pinned_staged"}, device, False)
    assert "makes no Event without arguments" in told[1]
    assert stats == {"pageable": 6}
    with build_transfer({"strategy": "pinned_staged", "fallback": False}, device) as strict:
        destination = device.device_empty(10, dtype=torch.bfloat16)
        destination.fill_(-7)
        with pytest.raises(StrategyUnavailableError, match="makes no Event"):
            strict.copy(destination, torch.zeros(10))
        assert (destination == -7).all()


@pytest.mark.parametrize("missing", ["Event", "Stream"])
def test_a_deepspeed_accelerator_whose_events_take_arguments_is_served_plainly(missing):
    """On a device that is DeepSpeed's CPU accelerator with events and streams of a vendor's."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Plain:
        def synchronize(self):
            pass

    class Vendors(Plain):
        def __init__(self, device):
            raise AssertionError("cannot be reached")

    kinds = {"Event": Plain, "Stream": Plain, missing: Vendors}
    vendor = type("Vendor", (CPU_Accelerator,), kinds)()
    vendor._name = "acme"
    destination = torch.zeros(600_000, dtype=torch.bfloat16)
    with build_transfer({}, adapt(vendor)) as transfer:
        transfer.copy(destination, torch.arange(600_000.0))
        assert [name for name, counts in transfer.stats().items() if counts.copies] == ["pageable"]
    assert torch.equal(destination, torch.arange(600_000.0).bfloat16())
