"""A failure is clean."""

from __future__ import annotations

import pytest
import torch

from accelerators import Accelerator
from accelerators.testing import failing, fetch, skip_without

from ..errors import TransferError
from ..interface import HostToDeviceTransfer
from ._hooks import GUARD, Hooks


class CleanFailures(Hooks):
    """Contract, point 5."""

    @pytest.mark.parametrize("after", [0, 1, 4])
    @pytest.mark.parametrize(
        "method",
        ["enqueue_copy", "Event", "Event.record", "Event.synchronize", "current_stream", "stream", "pin_empty"],
    )
    @pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt(), OSError("injected")])
    def test_a_failure_is_clean(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, method: str, error: BaseException, after: int
    ) -> None:
        if method.startswith("Event"):
            skip_without(accelerator, "events")
        destination = accelerator.device_empty(4003, dtype=torch.bfloat16)
        destination.fill_(GUARD)
        source = torch.arange(4003.0)
        with failing(accelerator, method, error, after=after):
            try:
                copy = transfer.submit(destination, source)
                copy.wait()
            except type(error) as caught:
                assert caught is error or isinstance(caught, TransferError)
        if hasattr(accelerator, "pinned_bytes"):
            assert accelerator.pinned_bytes == transfer.pinned_bytes, "a buffer was lost"
        got = fetch(accelerator, destination)
        new = source.bfloat16()
        assert ((got == new) | (got == GUARD)).all(), "an element is neither its old nor its new value"
        for value in (1.0, 2.0, 3.0):
            transfer.copy(destination, source + value)
            assert torch.equal(destination.cpu(), (source + value).bfloat16())
