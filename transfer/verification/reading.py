"""Elements of a destination, brought back to the host.

A sample is read back by the device itself, right after the copy, into pinned memory: the host waits for nothing, and
what is written to the destination later is not seen. Where there is no such memory, and where everything is compared,
the host reads when it has waited for the copy.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from accelerators import Accelerator

from ..accelerator_choice import accelerator_errors
from ..in_flight import InFlightCopy, finish_stream
from .sampling import SAMPLE_BYTES, Part

#: Samples that may be in flight on one device before the oldest is moved into ordinary memory.
SLOTS = 128


class ReadBack(Protocol):
    """The elements of one copy on their way back."""

    @property
    def is_ready(self) -> bool:
        """Whether ``read`` has nothing left to wait for; does not block."""

    def order(self, stream: Any) -> bool:
        """Makes later work of ``stream`` wait until the elements are read, if that is queued already."""

    def read(self) -> list[Tensor]:
        """The elements of each part. Called once the copy has ended; blocks until they are on the host."""


class ReadLater(ReadBack):
    """The host reads the elements when it asks for them.

    Args:
        accelerator: Copies them.
        stream: Where it does: one of its own if there is one, so that nothing but the copy itself has ordered them.
        parts: What is read.
    """

    def __init__(self, accelerator: Accelerator, stream: Any, parts: Sequence[Part]) -> None:
        self._accelerator, self._stream, self._parts = accelerator, stream, parts

    @property
    def is_ready(self) -> bool:
        return True

    def order(self, stream: Any) -> bool:  # noqa: ARG002 - there is nothing to order
        return False

    def read(self) -> list[Tensor]:
        found = []
        with self._accelerator.stream(self._stream):
            for part in self._parts:
                found.append(torch.empty(part.target.shape, dtype=part.target.dtype, device="cpu"))
                self._accelerator.enqueue_copy(found[-1], part.target)
        finish_stream(self._accelerator, self._stream, self._parts[0].target.device.index)
        return found


class Snapshot(ReadBack):
    """The elements as they were when the copy had ended, in a slot until another sample needs it."""

    def __init__(self, found: list[Tensor]) -> None:
        self._found = found
        self._error: Exception | None = None
        self._lock = threading.RLock()  # one thread waits for the copy, another one needs the slot
        #: After which the slot holds them; None once they are in ordinary memory.
        self.event: Any = None

    @property
    def is_ready(self) -> bool:
        event = self.event
        return event is None or bool(event.query())

    def order(self, stream: Any) -> bool:
        event = self.event
        if event is not None:
            stream.wait_event(event)
        return True

    def read(self) -> list[Tensor]:
        self.keep()
        if self._error is not None:
            raise self._error
        return self._found

    def keep(self) -> None:
        """Moves the elements into ordinary memory, once they are there, which blocks. The slot can be used again then.

        What that reports is for the one who waits for this copy.
        """
        with self._lock:
            if self.event is None:
                return
            try:
                self.event.synchronize()
                self._found = [each.clone() for each in self._found]
            except Exception as error:  # noqa: BLE001 - whatever a vendor's event raises
                self._error = error
            self.event = None


class Slots:
    """Pinned memory for samples of copies to one device, used in turn. A holding.

    Not thread-safe: its owner holds a lock around every method. A signal handler may interrupt any of them.

    Args:
        accelerator: Has streams and events, and pins memory.
        stream: On the destinations' device, and used for nothing else: its order guards each slot.
    """

    def __init__(self, accelerator: Accelerator, stream: Any) -> None:
        self._accelerator, self._stream = accelerator, stream
        self._memory: Tensor | None = None
        self._turns = itertools.count()
        self._users: dict[int, weakref.ref[Snapshot]] = {}

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def open(self) -> None:
        """Pins the memory; raises what the accelerator raises where that is refused."""
        with torch.inference_mode(False):
            self._memory = self._accelerator.pin_empty(SLOTS * SAMPLE_BYTES, dtype=torch.uint8)

    def take(self, copy: InFlightCopy, parts: Sequence[Part]) -> Snapshot:
        """Queues the reading of a sample behind its copy. Blocks only where ``SLOTS`` samples were not asked for yet.

        Args:
            copy: What the reading is ordered after.
            parts: Of one dtype; at most ``SAMPLE_BYTES``.
        """
        slot = next(self._turns) % SLOTS
        before = self._users.get(slot)
        user = before() if before is not None else None
        if user is not None:
            user.keep()
        snapshot = Snapshot(self._divide(slot, parts))
        self._users[slot] = weakref.ref(snapshot)
        copy.order_after(self._stream)
        with self._accelerator.stream(self._stream):
            for part, found in zip(parts, snapshot._found, strict=True):
                self._accelerator.enqueue_copy(found, part.target)
            event = self._accelerator.Event()  # type: ignore[misc]  # has events
            event.record()
        snapshot.event = event
        return snapshot

    def _divide(self, slot: int, parts: Sequence[Part]) -> list[Tensor]:
        assert self._memory is not None  # noqa: S101 - for the type checker
        memory = self._memory.narrow(0, slot * SAMPLE_BYTES, SAMPLE_BYTES).view(parts[0].target.dtype)
        found, begin = [], 0
        for part in parts:
            found.append(memory.narrow(0, begin, part.target.numel()).view(part.target.shape))
            begin += part.target.numel()
        return found

    def close(self) -> None:
        """Waits for what is being read, moves it into ordinary memory, and unpins."""
        for reference in self._users.values():
            user = reference()
            if user is not None:
                user.keep()
        self._users.clear()
        with accelerator_errors():
            self._stream.synchronize()
            if self._memory is not None:
                self._accelerator.unpin_memory(self._memory)
        self._memory = None
