"""A ring of slots on the device: a stream each, and scratch for values that are cast where they arrive."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ..in_flight import EventCopy, made
from ..stats import Counters


class _Slot:
    """A stream, and a scratch buffer that only this stream uses: the stream's order guards it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.scratch: Tensor | None = None
        self.event: Any = None  # after the last chunk of the copy under way


class ScratchRing:
    """Chunks take the slots in turn; each slot copies a chunk into its scratch and casts it from there.

    While one slot casts, the link is busy with the other's chunk. The next chunk of a slot overwrites
    its scratch after the cast because both are queued on the same stream, whichever copy they belong
    to; no event has to guard it.

    Made without streams and memory: ``open`` makes the streams, ``allocate`` the scratch.
    Not thread-safe: its owner holds a lock around every method.

    Args:
        accelerator: Has streams and events.
        dtype: Of the values on the host, and of the scratch buffers.
        chunk_elements: Elements in each scratch buffer.
        slots: Number of slots.
        device_index: The device that copies go to.
        counters: Where chunks, and waits for copies, are counted.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        dtype: torch.dtype,
        chunk_elements: int,
        slots: int,
        device_index: int | None,
        counters: Counters,
    ) -> None:
        self._accelerator = accelerator
        self._dtype = dtype
        #: Elements in each scratch buffer.
        self.chunk_elements = chunk_elements
        self._number = slots
        self._device_index = device_index
        self._counters = counters
        self._slots: list[_Slot] = []
        self._turn = 0
        self._in_flight: deque[EventCopy] = deque()
        self._unsettled = False

    @property
    def scratch_bytes(self) -> int:
        return sum(slot.scratch.nbytes for slot in tuple(self._slots) if slot.scratch is not None)

    def open(self) -> None:
        """Makes the streams.

        Raises:
            StrategyUnavailableError: They, or events, cannot be made without arguments.
            Exception: What the accelerator raises.
        """
        accelerator = self._accelerator
        with accelerator.stream(accelerator.current_stream(self._device_index)):  # makes the device current
            made(accelerator, "Event")  # here, where a copy can still take another way
            self._slots = [_Slot(made(accelerator, "Stream")) for _ in range(self._number)]

    def allocate(self) -> BaseException | None:
        """Allocates the scratch, for chunks that cannot be copied straight into the destination. Idempotent.

        Returns:
            The error where memory is refused; no scratch is held then.
        """
        for slot in self._slots:
            if slot.scratch is not None:
                continue
            # On the slot's stream, to which an allocator that keeps freed memory apart by stream ties it.
            with self._accelerator.stream(slot.stream), torch.inference_mode(False):
                try:
                    slot.scratch = self._accelerator.device_empty(self.chunk_elements, dtype=self._dtype)
                except REFUSALS as error:
                    for other in self._slots:  # of a set that was never complete, so no copy has used it
                        other.scratch = None
                    return error
        return None

    def begin(self) -> None:
        """Begins one copy, after what is queued on the caller's current stream; ``finish`` ends it.

        A copy that was begun and not ended is waited for by the next one, as nothing tells how far it came.
        """
        self.settle()
        self._unsettled = True
        accelerator = self._accelerator
        caller = accelerator.current_stream(self._device_index)
        with accelerator.stream(caller):
            queued_before = accelerator.Event()  # type: ignore[misc]  # has events
            queued_before.record()
        for slot in self._slots:
            slot.stream.wait_event(queued_before)
            slot.event = None

    def send(self, target: Tensor, values: Tensor) -> Any:
        """Queues one chunk on the next slot; does not block. The caller keeps both alive until the copy has ended.

        Args:
            target: On the device, any strides.
            values: Of the same shape, contiguous and page-locked, at most ``chunk_elements`` where they need
                scratch; or the source as the device addresses it.

        Returns:
            The event after which ``target`` holds the values.
        """
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        accelerator = self._accelerator
        with accelerator.stream(slot.stream):
            in_place = target.dtype == values.dtype and target.is_contiguous()
            scratch = slot.scratch
            if scratch is not None and not in_place and not accelerator.on_device(values):
                if values.shape != scratch.shape:
                    scratch = scratch.narrow(0, 0, values.numel()).view(values.shape)
                accelerator.enqueue_copy(scratch, values)
                values = scratch
            accelerator.enqueue_copy(target, values)
            event = slot.event = accelerator.Event()  # type: ignore[misc]  # has events
            event.record()
        self._counters.add(pieces=1)
        return event

    def finish(self, destination: Tensor, reads: Any = None) -> EventCopy:
        """What was sent since ``begin``, as one copy.

        Args:
            destination: All of it, which lives as long as the copy.
            reads: What the copy reads, which lives as long.
        """
        # Before anything else can be sent: a slot's last event follows all that this copy queued there.
        events = [slot.event for slot in self._slots if slot.event is not None]
        copy = EventCopy(events, destination, reads, self._counters, self._accelerator)
        self._in_flight.append(copy)
        self._unsettled = False
        return copy

    def settle(self, wait: bool = False) -> None:
        """Forgets the copies that have ended.

        An event that cannot be asked, such as one recorded while a graph was captured, may never answer. The whole
        device is waited for then; what the event reports is for the one who waits for its copy.

        Args:
            wait: Blocks until all of them have.

        Raises:
            Exception: What the accelerator reports about the device; it is asked again next time.
        """
        if self._unsettled:  # a copy was interrupted while it was queued: nothing tells how far it came
            self._accelerator.synchronize(self._device_index)
            self._unsettled = False
        while self._in_flight:
            copy = self._in_flight[0]
            try:
                if wait:
                    copy.synchronize()
                elif not copy.done:
                    return
            except Exception:  # noqa: BLE001 - whatever a vendor's event raises
                self._accelerator.synchronize(self._device_index)
            if self._in_flight and self._in_flight[0] is copy:
                self._in_flight.popleft()

    def close(self) -> None:
        """Waits for every copy and drops streams and scratch. A ring is not used afterwards."""
        self.settle(wait=True)
        self._slots.clear()
