"""Around the copies of one transfer: what each must have left is noted when it is submitted, and compared in a wait."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ..accelerator_choice import accelerator_errors
from ..errors import StrategyUnavailableError, TransferBusyError, VerificationError
from ..in_flight import InFlightCopy, made
from ..memory.holdings import Holdings
from ..memory.marking_guard import MarkingGuard
from ..nvme.swapped_tensor import SwappedTensor
from .comparing import compare
from .reading import ReadBack, ReadLater, Slots, Snapshot
from .sampling import Part, everything, sample


class Verifier:
    """Compares the copies of one transfer. Thread-safe.

    Its random numbers are its own: those of Python, numpy and torch stay as they are.

    Args:
        mode: ``sample`` or ``full``.

    Attributes:
        seed: With the number of a copy, it says which elements were compared.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.seed = int.from_bytes(os.urandom(4), "little")
        self._numbers = itertools.count(1)
        self._streams: dict[torch.device, Any] = {}
        self._held = Holdings()
        self._guard = MarkingGuard(Verifier._close)  # unbound: a cycle would keep the memory until it is collected
        self._refused = False  # the slots' memory, since the last close
        weakref.finalize(self, _close, self._held)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory that samples are read into: 1 MiB for each device."""
        return self._held.total("pinned_bytes")

    def watch(
        self, accelerator: Accelerator, copy: InFlightCopy, destination: Tensor, source: Tensor | SwappedTensor
    ) -> InFlightCopy:
        """The same copy, compared in its first ``wait``. What it must leave is taken from the source now.

        Args:
            accelerator: The one that it goes to.
            copy: What a strategy has just returned: the source still holds what was copied.
            destination: Of at least one element.
            source: Where it is on the device, the copy is returned as it is.
        """
        if isinstance(source, Tensor) and not accelerator.on_host(source):
            return copy
        number = next(self._numbers)
        if self._mode == "full":
            parts = everything(destination, source)
        else:
            parts = sample(destination, source, Random(self.seed << 32 | number))
        index = destination.device.index
        stream = self._stream(accelerator, destination) if accelerator.on_device(destination) else None
        reading: ReadBack | None = None
        if stream is not None and self._mode != "full":
            reading = self._snapshot(accelerator, stream, copy, destination, parts)
        if reading is None:
            reading = ReadLater(accelerator, stream or accelerator.current_stream(index), parts)
        mode, seed = self._mode, self.seed
        return VerifiedCopy(
            copy,
            reading,
            lambda found: compare(parts, found, destination, mode, seed, number),
            lambda: accelerator.synchronize(index),
        )

    def _stream(self, accelerator: Accelerator, destination: Tensor) -> Any:
        """A stream on the destination's device that has nothing else to do; None where none can be made."""
        stream = self._streams.get(destination.device)
        if stream is None and accelerator.Stream is not None:
            with (
                contextlib.suppress(StrategyUnavailableError),
                accelerator.stream(accelerator.current_stream(destination.device.index)),
            ):
                stream = self._streams.setdefault(destination.device, made(accelerator, "Stream"))
        return stream

    def _snapshot(
        self, accelerator: Accelerator, stream: Any, copy: InFlightCopy, destination: Tensor, parts: Sequence[Part]
    ) -> Snapshot | None:
        """The sample on its way into a slot; None where there are none, or this thread is in the middle of this."""
        needed = accelerator.capabilities.why_not("streams", "events", "pins_host_memory", "copies_asynchronously")
        if needed is not None:
            return None
        try:
            return self._guard.alone(self._take, accelerator, stream, copy, destination, parts)
        except TransferBusyError:
            return None

    def _take(
        self, accelerator: Accelerator, stream: Any, copy: InFlightCopy, destination: Tensor, parts: Sequence[Part]
    ) -> Snapshot | None:
        self._held.close_requested()  # what an interrupted close has left
        slots = None if self._refused else self._slots(accelerator, stream, destination)
        return None if slots is None else slots.take(copy, parts)

    def _slots(self, accelerator: Accelerator, stream: Any, destination: Tensor) -> Slots | None:
        try:
            return self._held.get(destination.device, lambda: Slots(accelerator, stream))
        except (StrategyUnavailableError, *REFUSALS):  # the host reads when it has waited: later, and the same
            self._refused = True
            return None

    def close(self) -> None:
        """Gives the pinned memory back. Copies that were not waited for keep what was read for them."""
        self._held.request_close()
        try:
            self._guard.alone(self._close)
        except TransferBusyError:
            self._guard.mark(self)  # in the middle of a copy of this thread, which closes it when it ends

    def _close(self) -> None:
        self._held.close_requested()
        self._streams.clear()
        self._refused = False


def _close(held: Holdings) -> None:
    """A finalizer, so it waits for no other thread's lock."""
    held.request_close()
    held.close_requested()


class VerifiedCopy(InFlightCopy):
    """A copy that is compared by the first of ``wait`` and ``done`` that sees it finished; later ones do not look.

    Args:
        copy: What the strategy returned.
        reading: Brings back what it has left.
        judge: Takes what was brought back; returns the error, or None.
        drain: Waits for the device, where the reading fails.
    """

    def __init__(
        self,
        copy: InFlightCopy,
        reading: ReadBack,
        judge: Callable[[list[Tensor]], VerificationError | None],
        drain: Callable[[], object],
    ) -> None:
        self._copy = copy
        self._pending: tuple[ReadBack, Callable[..., VerificationError | None], Callable[[], object]] | None
        self._pending = reading, judge, drain

    def __repr__(self) -> str:
        state = "compared" if self._pending is None else "not compared"
        return f"<{type(self).__name__}: {state}, of {self._copy!r}>"

    def wait(self) -> None:
        """As that of the strategy's copy.

        Raises:
            VerificationError: The destination does not hold the values. Raised once; it keeps what it holds.
            Exception: As the strategy's. Nothing is compared then.
        """
        with self._nothing_to_compare_after_an_error():
            self._copy.wait()
        self._compare()

    def order_after(self, stream: Any) -> None:
        pending = self._pending
        self._copy.order_after(stream)
        if pending is None:
            return
        with accelerator_errors():
            ordered = stream is not None and pending[0].order(stream)
        if not ordered:
            self.wait()

    def release_source(self) -> None:
        with self._nothing_to_compare_after_an_error():
            self._copy.release_source()

    @property
    def done(self) -> bool:
        if not self._copy.done:
            return False
        pending = self._pending
        if pending is not None:
            with accelerator_errors():
                if not pending[0].is_ready:
                    return False
            self._compare()
        return True

    @contextlib.contextmanager
    def _nothing_to_compare_after_an_error(self) -> Iterator[None]:
        """Each element is the old or the new one then."""
        try:
            yield
        except Exception:
            self._pending = None
            raise

    def _compare(self) -> None:
        pending = self._pending
        if pending is None:
            return
        reading, judge, drain = pending
        try:
            with accelerator_errors(), torch.no_grad():
                found = reading.read()
        except Exception:
            self._pending = None
            with contextlib.suppress(Exception):
                drain()
            raise
        error = judge(found)
        self._pending = None
        if error is not None:
            raise error
