"""A failure is clean."""

from __future__ import annotations

import contextlib
import warnings
from unittest import mock

import pytest
import torch

from accelerators import Accelerator
from accelerators.testing import failing, fetch, skip_without

from ..errors import FallbackWarning, TransferError
from ..interface import HostToDeviceTransfer
from ._hooks import GUARD, Hooks

METHODS = (
    "enqueue_copy",
    "Event",
    "Event.record",
    "Event.synchronize",
    "current_stream",
    "stream",
    "pin_empty",
    "is_pinned",
    "on_device",
    "on_host",
    "synchronize",
    "Stream",
    "device_empty",
    "register_host_memory",
)
#: What a strategy may do without after an error, so that nothing is raised.
MAY_DO_WITHOUT = ("pin_empty", "is_pinned", "register_host_memory", "device_empty")


class CleanFailures(Hooks):
    """Contract, point 5."""

    @pytest.mark.parametrize(("after", "numel"), [(0, 100), (0, 4003), (1, 4003), (4, 4003)])
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt(), OSError("injected")])
    def test_a_failure_is_clean(
        self,
        accelerator: Accelerator,
        transfer: HostToDeviceTransfer,
        method: str,
        error: BaseException,
        after: int,
        numel: int,
    ) -> None:
        if method.startswith("Event"):
            skip_without(accelerator, "events")
        if method == "Stream":
            skip_without(accelerator, "streams")
        # A strategy may do without what it could not pin; then the copy is right and nothing is raised.
        may_do_without = method in MAY_DO_WITHOUT and not isinstance(error, KeyboardInterrupt)
        warnings.filterwarnings("ignore", category=FallbackWarning)
        destination = accelerator.device_empty(numel, dtype=torch.bfloat16)
        destination.fill_(GUARD)
        accelerator.synchronize()
        source = torch.arange(float(numel))
        new = source.bfloat16()
        raised: BaseException | None = None
        with failing(accelerator, method, error, after=after) as calls:
            try:
                transfer.copy(destination, source)
            except (type(error), TransferError) as caught:
                raised = caught
        if raised is None:
            assert len(calls) <= after or may_do_without, f"{method} failed, and nobody was told"
            assert torch.equal(fetch(accelerator, destination), new)
        else:
            got = destination.cpu().clone()
            assert ((got == new) | (got == GUARD)).all(), "an element is neither its old nor its new value"
            # Nothing is in flight: what is written now stays.
            destination.fill_(5)
            assert (fetch(accelerator, destination) == 5).all(), "a piece arrived after the error"
        if hasattr(accelerator, "pinned_bytes"):
            assert accelerator.pinned_bytes == transfer.pinned_bytes, "a buffer was lost"
        for value in (1.0, 2.0, 3.0):
            transfer.copy(destination, source + value)
            assert torch.equal(destination.cpu(), (source + value).bfloat16())

    @pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()])
    @pytest.mark.parametrize("method", ["unpin_memory", "unregister_host_memory", "Event.synchronize", "synchronize"])
    def test_a_close_that_fails_can_be_repeated_and_spoils_nothing(
        self, accelerator: Accelerator, method: str, error: BaseException
    ) -> None:
        if method.startswith("Event"):
            skip_without(accelerator, "events")
        before = getattr(accelerator, "pinned_bytes", 0)
        transfer = self.make_transfer(accelerator)
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        for after in (0, 1):
            with (
                failing(accelerator, method, error, after=after),
                contextlib.suppress(type(error), TransferError),
            ):
                transfer.submit(destination, torch.arange(3000.0))
                transfer.close()
            transfer.copy(destination, torch.full((3000,), 2.0 + after))
            assert (destination.cpu() == 2 + after).all()
        transfer.close()
        assert transfer.pinned_bytes == 0
        assert getattr(accelerator, "pinned_bytes", 0) == before

    def test_a_submit_inside_a_submit_spoils_neither(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        """As a signal handler or a finalizer would: in the same thread, between any two steps."""
        original = accelerator.enqueue_copy
        outer, inner = (accelerator.device_empty(4000, dtype=torch.bfloat16) for _ in range(2))
        calls: list[int] = []

        def interrupted(destination: torch.Tensor, source: torch.Tensor) -> None:
            calls.append(1)
            if len(calls) == min(3, turn):
                transfer.copy(inner, torch.full((4000,), 7.0))
            original(destination, source)

        for turn in (1, 3):
            calls.clear()
            with mock.patch.object(accelerator, "enqueue_copy", interrupted):
                transfer.copy(outer, torch.arange(4000.0))
            assert torch.equal(outer.cpu(), torch.arange(4000.0).bfloat16())
            assert turn > 1 or (inner.cpu() == 7).all()

    def test_a_close_inside_a_submit_is_done_after_it(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        original = accelerator.enqueue_copy

        def interrupted(destination: torch.Tensor, source: torch.Tensor) -> None:
            transfer.close()
            original(destination, source)

        destination = accelerator.device_empty(4000, dtype=torch.bfloat16)
        with mock.patch.object(accelerator, "enqueue_copy", interrupted):
            transfer.copy(destination, torch.arange(4000.0))
        assert torch.equal(destination.cpu(), torch.arange(4000.0).bfloat16())
        assert transfer.pinned_bytes == 0
