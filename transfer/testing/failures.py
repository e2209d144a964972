"""A failure is clean."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from unittest import mock

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import ANY_METHOD, check_values, failing, fetch

from ..errors import FallbackWarning, StrategyUnavailableError, TransferError
from ..interface import HostToDeviceTransfer
from ._hooks import GUARD, Hooks, check_copy, described, host_source, read

#: Methods without which a copy may still be made. An exception from any other must reach the caller.
MAY_DO_WITHOUT = (
    "pin_empty",
    "unpin_memory",
    "is_pinned",
    "register_host_memory",
    "unregister_host_memory",
    "device_empty",
    "device_view",
    "on_host",
    "Event",
    "range_push",
    "range_pop",
    "Event.query",
    "Event.synchronize",
    # Asked or made before anything is copied: another strategy may do without, where the transfer falls back.
    "on_host",
    "Event",
    "Stream",
)

_Copy = tuple[str, torch.dtype, bool]

#: What fails: the kind of source, the destination's dtype, and whether a copy that was made before is in flight.
_COPIES = (
    ("pageable", torch.bfloat16, False),
    ("prepared", torch.bfloat16, True),
    ("pinned", torch.float32, True),
)
#: The same kinds, each with the other dtype and the other state.
_OTHER_COPIES = (
    ("pageable", torch.float32, True),
    ("prepared", torch.float32, False),
    ("pinned", torch.bfloat16, False),
)

#: What is raised in turn: a driver's error or the system's, of which a strategy may handle some; or an interrupt. With
#: the copies that fail, every pair is there of a kind, a dtype, a copy in flight or none, an error or an interrupt.
each_kind_of_error = pytest.mark.parametrize(
    ("errors", "copies"),
    [((RuntimeError, OSError), _COPIES), ((KeyboardInterrupt,), _OTHER_COPIES)],
    ids=["error", "interrupt"],
)


class CleanFailures(Hooks):
    """Contract, point 5: each call that a copy or a close makes on the accelerator raises, in one run of the test each.

    Calls are those of the public methods of the accelerator, its events and its streams.
    """

    @each_kind_of_error
    def test_a_failure_is_clean(
        self, accelerator: Accelerator, errors: tuple[type[BaseException], ...], copies: tuple[_Copy, ...]
    ) -> None:
        warnings.filterwarnings("ignore", category=FallbackWarning)
        for turn, (kind, dtype, in_use) in enumerate(_possible(copies, accelerator)):
            for after in itertools.count():
                error = errors[(turn + after) % len(errors)]("injected")  # a new one: it keeps the frames it passes
                fresh = _fresh(accelerator)
                with contextlib.closing(self.make_transfer(fresh)) as transfer:
                    calls = self._fail_a_copy(fresh, transfer, error, after, kind, dtype, in_use)
                assert transfer.pinned_bytes == 0
                if len(calls) <= after:
                    break
            assert after > 0, "a copy calls the accelerator"

    def _fail_a_copy(
        self,
        accelerator: Accelerator,
        transfer: HostToDeviceTransfer,
        error: BaseException,
        after: int,
        kind: str,
        dtype: torch.dtype,
        in_use: bool,
    ) -> list[str]:
        values = torch.arange(float(self.several_chunks))
        new = values.to(dtype)
        destination, another = (accelerator.device_empty(self.several_chunks, dtype=dtype) for _ in range(2))
        destination.fill_(GUARD)
        accelerator.synchronize()
        with host_source(accelerator, transfer, values, kind) as source:
            pinned = getattr(accelerator, "pinned_bytes", 0) - transfer.pinned_bytes
            earlier = transfer.submit(another, source) if in_use else None
            raised: BaseException | None = None
            with failing(accelerator, ANY_METHOD, error, after=after) as calls:
                try:
                    transfer.copy(destination, source)
                except (type(error), TransferError) as caught:
                    raised = caught
            failed = calls[after] if len(calls) > after else ""
            what = f"{error!r} from call {after}, {failed}, {described(kind, dtype)}"
            if raised is None:
                may_do_without = failed in MAY_DO_WITHOUT and isinstance(error, Exception)
                assert not failed or may_do_without, f"{what}: nothing was raised"
                check_copy(accelerator, destination, new, what)
            else:
                assert failed, f"{raised!r} without a cause"
                got = destination.cpu().clone()
                # Where an element is neither, it differs from its new value.
                check_values(torch.where(got == GUARD, new, got), new, f"{what}: neither the old nor the new value")
                destination.fill_(5)
                check_values(
                    fetch(accelerator, destination), torch.full_like(new, 5), f"{what}: a part arrived after the error"
                )
            if earlier is not None:
                earlier.wait()
                check_copy(accelerator, another, new, f"{what}: the copy before it")
            if hasattr(accelerator, "pinned_bytes"):
                assert accelerator.pinned_bytes == pinned + transfer.pinned_bytes, f"{what}: a buffer was lost"
            source.fill_(3)
            _copies_or_refuses(accelerator, transfer, destination, source)
        return calls

    @each_kind_of_error
    def test_a_close_that_fails_can_be_repeated_and_spoils_nothing(
        self, accelerator: Accelerator, errors: tuple[type[BaseException], ...], copies: tuple[_Copy, ...]
    ) -> None:
        warnings.filterwarnings("ignore", category=FallbackWarning)
        for turn, (kind, dtype, _) in enumerate(_possible(copies, accelerator)):
            for after in itertools.count():
                error = errors[(turn + after) % len(errors)]("injected")  # a new one: it keeps the frames it passes
                fresh = _fresh(accelerator)
                before = getattr(fresh, "pinned_bytes", 0)
                transfer = self.make_transfer(fresh)
                values = torch.arange(float(self.several_chunks))
                destination = fresh.device_empty(self.several_chunks, dtype=dtype)
                with host_source(fresh, transfer, values, kind) as source:
                    copy = transfer.submit(destination, source)
                    with (
                        failing(fresh, ANY_METHOD, error, after=after) as calls,
                        contextlib.suppress(type(error), TransferError),
                    ):
                        transfer.unprepare(source)
                        transfer.close()
                    copy.wait()
                    check_copy(
                        fresh, destination, values.to(dtype), f"close failed at call {after}, {described(kind, dtype)}"
                    )
                    source.fill_(3)
                    _copies_or_refuses(fresh, transfer, destination, source)
                    transfer.close()
                    assert transfer.pinned_bytes == 0, f"call {after}, {calls}"
                assert getattr(fresh, "pinned_bytes", 0) == before, f"call {after}, {calls}"
                if len(calls) <= after:
                    break

    def test_a_submit_inside_a_submit_spoils_neither(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        """As a signal handler or a finalizer would: in the same thread, between any two steps."""
        original = accelerator.enqueue_copy
        outer, inner = (accelerator.device_empty(4000, dtype=torch.bfloat16) for _ in range(2))
        calls: list[int] = []
        copied: list[int] = []

        def interrupted(destination: Tensor, source: Tensor) -> None:
            calls.append(1)
            if len(calls) == min(3, turn):
                with contextlib.suppress(TransferError):  # a strategy may refuse it
                    transfer.copy(inner, torch.full((4000,), 7.0))
                    copied.append(turn)
            original(destination, source)

        for turn in (1, 3):
            calls.clear()
            with mock.patch.object(accelerator, "enqueue_copy", interrupted):
                transfer.copy(outer, torch.arange(4000.0))
            check_copy(accelerator, outer, torch.arange(4000.0).bfloat16(), "the outer copy")
            assert turn not in copied or (read(accelerator, inner) == 7).all(), "the inner copy is wrong"

    def test_a_close_inside_a_submit_is_done_after_it(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        original = accelerator.enqueue_copy

        def interrupted(destination: Tensor, source: Tensor) -> None:
            transfer.close()
            original(destination, source)

        destination = accelerator.device_empty(4000, dtype=torch.bfloat16)
        with mock.patch.object(accelerator, "enqueue_copy", interrupted):
            transfer.copy(destination, torch.arange(4000.0))
        check_copy(accelerator, destination, torch.arange(4000.0).bfloat16(), "a copy that a close interrupted")
        assert transfer.pinned_bytes == 0


def _possible(copies: tuple[_Copy, ...], accelerator: Accelerator) -> list[_Copy]:
    registers = accelerator.capabilities.registers_host_memory
    return [copy for copy in copies if copy[0] != "prepared" or registers]


def _fresh(accelerator: Accelerator) -> Accelerator:
    """A simulated accelerator keeps every stream that it has made, and slows down; a real one is used as it is."""
    if type(accelerator) is not SimulatedAccelerator:
        return accelerator
    return SimulatedAccelerator(
        accelerator.seed,
        streams=accelerator.Stream is not None,
        events=accelerator.Event is not None,
        maps_host_memory=accelerator.maps_host_memory,
        eager=accelerator.eager,
        pin_limit_bytes=accelerator.pin_limit_bytes,
    )


def _copies_or_refuses(
    accelerator: Accelerator, transfer: HostToDeviceTransfer, destination: Tensor, source: Tensor
) -> None:
    """After an error the next copy is right, or the strategy says that it no longer can and writes nothing."""
    before = fetch(accelerator, destination)
    try:
        transfer.copy(destination, source)
    except StrategyUnavailableError:
        assert transfer.why_not(destination, source) is not None, "a strategy says beforehand what it cannot do"
        check_values(fetch(accelerator, destination), before, "a refused copy")
    else:
        check_copy(accelerator, destination, source.to(destination.dtype), "the copy after an error")
