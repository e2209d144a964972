"""How chunks that were read from a file go on to the destination: three ways, of one shape."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ..in_flight import FINISHED, EventCopy, InFlightCopy, finish_stream
from ..memory.chunks import plan_chunks, views_of_range
from ..memory.scratch_ring import ScratchLanes
from ..memory.staging_ring import StagingBuffer, StagingRing
from ..nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty
from ..nvme.read_ahead import Chunk
from ..stats import Counters


@dataclass(eq=False)
class Route(ABC):
    """From memory that files are read into, to one destination.

    Attributes:
        accelerator: The destination's.
        destination: All of it.
        dtype: Of the values in the file.
        counters: Of the strategy.
    """

    accelerator: Accelerator
    destination: Tensor
    dtype: torch.dtype
    counters: Counters

    @property
    def is_aligned(self) -> bool:
        """Whether files can be read into the memory past the page cache."""
        return True

    @contextmanager
    def session(self) -> Iterator[None]:
        """The block in which memory is taken and chunks are delivered."""
        with self.accelerator.stream(self.accelerator.current_stream(self.destination.device.index)):
            yield

    @abstractmethod
    def acquire(self) -> StagingBuffer:
        """Memory for the next chunk, once nothing reads it any more. Blocks the host for that."""

    @abstractmethod
    def deliver(self, chunk: Chunk, buffer: StagingBuffer) -> None:
        """Sends a chunk that was read on its way."""

    @abstractmethod
    def finish(self) -> InFlightCopy:
        """The copy, after the last chunk."""

    def _pieces(self, first: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the destination from an element on, and the values that belong there."""
        offset = 0
        for view in views_of_range(self.destination, first, first + values.numel()):
            yield view, values.narrow(0, offset, view.numel()).view(view.shape)
            offset += view.numel()

    def _values(self, chunk: Chunk, buffer: StagingBuffer) -> Tensor:
        return buffer.memory.narrow(0, chunk.skip, chunk.num_bytes).view(self.dtype)


class HostMemory:
    """Ordinary memory that files are read into, used in turn by routes that are done with it at once.

    Args:
        capacity: Bytes of each buffer.
        buffers: How many.
    """

    def __init__(self, capacity: int, buffers: int) -> None:
        self._buffers = [StagingBuffer(aligned_empty(capacity)) for _ in range(buffers)]
        self._next = 0

    def acquire(self) -> StagingBuffer:
        """The next buffer."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer


@dataclass(eq=False)
class PlainRoute(Route):
    """The copy that torch does by itself, which blocks: everywhere, also to a destination on the host."""

    memory: HostMemory

    def acquire(self) -> StagingBuffer:
        return self.memory.acquire()

    def deliver(self, chunk: Chunk, buffer: StagingBuffer) -> None:
        started = time.perf_counter()
        for view, values in self._pieces(chunk.first, self._values(chunk, buffer)):
            self.accelerator.enqueue_copy(view, values)
        # The memory is read into again at once, and may have been copied from late.
        index = self.destination.device.index
        finish_stream(self.accelerator, self.accelerator.current_stream(index), index)
        self.counters.add(pieces=1, wait_seconds=time.perf_counter() - started)

    def finish(self) -> InFlightCopy:
        return FINISHED


@dataclass(eq=False)
class HostCastRoute(PlainRoute):
    """Cast on the host into a ring of pinned staging buffers, and copied from there."""

    ring: StagingRing
    _event: Any = field(default=None, init=False)

    @contextmanager
    def session(self) -> Iterator[None]:
        with super().session(), self.ring.session():
            yield

    def deliver(self, chunk: Chunk, buffer: StagingBuffer) -> None:
        values = self._values(chunk, buffer)
        most = self.ring.chunk_elements // self.destination.element_size()
        for offset, length in plan_chunks(chunk.numel, most):  # several where the destination's dtype is wider
            self._stage(chunk.first + offset, values.narrow(0, offset, length))

    def _stage(self, first: int, values: Tensor) -> None:
        started = time.perf_counter()
        staging = self.ring.acquire()
        acquired = time.perf_counter()
        dtype = self.destination.dtype
        staged = staging.memory.narrow(0, 0, values.numel() * dtype.itemsize).view(dtype)
        staged.copy_(values)
        cast = time.perf_counter()
        for view, piece in self._pieces(first, staged):
            self.accelerator.enqueue_copy(view, piece)
        self._event = self.accelerator.Event()  # type: ignore[misc]  # not None: the strategy has checked
        self._event.record()
        staging.guard(self._event)
        self.counters.add(pieces=1, wait_seconds=acquired - started, cast_seconds=cast - acquired)

    def finish(self) -> InFlightCopy:
        return EventCopy(self._event, self.destination, counters=self.counters)


@dataclass(eq=False)
class DeviceCastRoute(Route):
    """Read into pinned memory, copied as it is into device scratch, and cast there."""

    ring: StagingRing
    lanes: ScratchLanes

    @property
    def is_aligned(self) -> bool:
        return self.ring.is_aligned(ALIGNMENT_BYTES)

    @contextmanager
    def session(self) -> Iterator[None]:
        with super().session(), self.ring.session(), self.lanes.session():
            yield

    def acquire(self) -> StagingBuffer:
        started = time.perf_counter()
        buffer = self.ring.acquire()
        self.counters.add(wait_seconds=time.perf_counter() - started)
        return buffer

    def deliver(self, chunk: Chunk, buffer: StagingBuffer) -> None:
        pieces = self._pieces(chunk.first, self._values(chunk, buffer))
        buffer.guard(self.lanes.send(pieces))
        self.counters.add(pieces=1)

    def finish(self) -> InFlightCopy:
        return self.lanes.latest(self.destination, self.counters)
