"""Lanes on the device: a stream each, and a scratch buffer for values that are cast where they arrive."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ..in_flight import EventCopy
from ..stats import Counters

#: Chunks queued on one lane before the next lane gets some: a lane that is filled alone, to the depth of
#: the device's queue, would leave the others idle.
_BURST = 32


class _Lane:
    """A stream and the scratch buffer that nothing but this stream touches: its order is the guard."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.scratch: Tensor | None = None


class ScratchLanes:
    """Chunks cross by turns on the lanes; each lane copies one into its scratch and casts it from there.

    While one lane casts, the link is busy with the other's chunk. The next chunk of a lane overwrites
    its scratch after the cast because both are queued on the same stream, whichever copy they belong
    to; no event has to guard it.

    Not thread-safe: its owner holds a lock around every method.

    Args:
        accelerator: Has streams and events.
        dtype: What crosses, and what the scratch buffers hold.
        chunk_elements: Elements in each scratch buffer.
        lanes: How many.
        device_index: The device that copies go to.
    """

    def __init__(
        self, accelerator: Accelerator, dtype: torch.dtype, chunk_elements: int, lanes: int, device_index: int | None
    ) -> None:
        self._accelerator = accelerator
        self._dtype = dtype
        #: Elements in each scratch buffer.
        self.chunk_elements = chunk_elements
        self._device_index = device_index
        self._in_flight: deque[EventCopy] = deque()
        self._unsettled = False
        self._turn = 0
        self._process = os.getpid()
        with accelerator.stream(accelerator.current_stream(device_index)):  # makes the device current
            self._lanes = [_Lane(accelerator.Stream()) for _ in range(lanes)]  # type: ignore[misc]  # has streams
        #: Whether the lanes are to be closed: they are not used any more, and ``close`` may be called again.
        self.closing = False

    @property
    def scratch_bytes(self) -> int:
        return sum(lane.scratch.nbytes for lane in tuple(self._lanes) if lane.scratch is not None)

    @property
    def is_ours(self) -> bool:
        """False in a fork of the process that made the lanes."""
        return os.getpid() == self._process

    def allocate(self) -> BaseException | None:
        """Allocates the scratch, which copies that cast need.

        Returns:
            The error where memory is refused; no scratch is held then.
        """
        for lane in self._lanes:
            if lane.scratch is not None:
                continue
            # On the lane's stream, to which an allocator that keeps freed memory apart by stream ties it.
            with self._accelerator.stream(lane.stream), torch.inference_mode(False):
                try:
                    lane.scratch = self._accelerator.device_empty(self.chunk_elements, dtype=self._dtype)
                except REFUSALS as error:
                    for other in self._lanes:  # of a set that was never complete, so no copy has used it
                        other.scratch = None
                    return error
        return None

    def cross(
        self, chunks: Sequence[tuple[Tensor, Tensor]], destination: Tensor, reads: Any, counters: Counters
    ) -> EventCopy:
        """Queues a copy; returns at once.

        Args:
            chunks: Views of destination and source that belong together. The source's are contiguous and
                device-registered, and of at most ``chunk_elements`` where they need scratch; or they are
                the source as the device addresses it.
            destination: All of it, which lives as long as the copy.
            reads: What the copy reads, likewise.
            counters: Where waits for the copy are counted.

        Returns:
            The copy in flight.
        """
        stride = len(self._lanes) * _BURST
        with self.session():
            for begin in range(0, len(chunks), stride):
                burst = chunks[begin : begin + stride]
                for turn, lane in enumerate(self._lanes):
                    with self._accelerator.stream(lane.stream):
                        for target, piece in burst[turn :: len(self._lanes)]:
                            self._cross_chunk(lane, target, piece)
            copy = EventCopy(self._mark(self._lanes[: len(chunks)]), destination, reads, counters)
            self._in_flight.append(copy)
        return copy

    def _follow_caller(self) -> None:
        """What is queued on the lanes from now on runs after what is queued on the caller's current stream."""
        accelerator = self._accelerator
        caller = accelerator.current_stream(self._device_index)
        with accelerator.stream(caller):
            queued_before = accelerator.Event()  # type: ignore[misc]  # has events
            queued_before.record()
        for lane in self._lanes:
            lane.stream.wait_event(queued_before)

    @contextmanager
    def session(self) -> Iterator[None]:
        """The block in which work is queued; what an exception leaves in it, the next one waits for."""
        self.settle()
        self._unsettled = True
        self._follow_caller()
        yield
        self._unsettled = False

    def send(self, chunks: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Queues some chunks on the next lane; returns the event after them.

        For sources that are not there at once, one after the other: as few calls as possible for each. The
        caller keeps the sources alive, and the destination until ``latest``.
        """
        lane = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        with self._accelerator.stream(lane.stream):
            for target, piece in chunks:
                self._cross_chunk(lane, target, piece)
            event = self._accelerator.Event()  # type: ignore[misc]  # has events
            event.record()
        return event

    def latest(self, destination: Tensor, counters: Counters) -> EventCopy:
        """Everything that was queued up to now, as one copy to ``destination``, which lives as long as the copy."""
        copy = EventCopy(self._mark(self._lanes), destination, counters=counters)
        self._in_flight.append(copy)
        return copy

    def _mark(self, lanes: Sequence[_Lane]) -> list[Any]:
        """An event on each lane, after what is queued there."""
        events = []
        for lane in lanes:
            with self._accelerator.stream(lane.stream):
                event = self._accelerator.Event()  # type: ignore[misc]  # has events
                event.record()
                events.append(event)
        return events

    def _cross_chunk(self, lane: _Lane, target: Tensor, piece: Tensor) -> None:
        if lane.scratch is None or not self.needs_scratch(target, piece):
            self._accelerator.enqueue_copy(target, piece)
            return
        scratch = lane.scratch
        if piece.shape != scratch.shape:
            scratch = scratch.narrow(0, 0, piece.numel()).view(piece.shape)
        self._accelerator.enqueue_copy(scratch, piece)
        self._accelerator.enqueue_copy(target, scratch)

    def needs_scratch(self, target: Tensor, piece: Tensor) -> bool:
        """Whether the bytes cannot cross right into the destination."""
        in_place = target.dtype == piece.dtype and target.is_contiguous()
        return not in_place and not self._accelerator.on_device(piece)

    def settle(self, wait: bool = False) -> None:
        """Forgets the copies that are finished.

        Args:
            wait: Blocks until all of them are.

        Raises:
            Exception: What the accelerator reports about one of them; it is asked again next time.
        """
        if self._unsettled:  # a copy was interrupted while it was queued: nothing tells how far it came
            self._accelerator.synchronize(self._device_index)
            self._unsettled = False
        while self._in_flight:
            copy = self._in_flight[0]
            if wait:
                copy.wait()
            elif not copy.done:
                return
            if self._in_flight and self._in_flight[0] is copy:
                self._in_flight.popleft()

    def close(self) -> None:
        """Waits for every copy and drops streams and scratch. Lanes are not used afterwards."""
        self.closing = True
        self.settle(wait=True)
        self._lanes.clear()
