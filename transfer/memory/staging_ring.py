"""A ring of pinned staging buffers, each guarded by the event of the last copy out of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ..in_flight import made
from ..stats import Counters


class StagingBuffer:
    """Pinned host memory that one copy at a time reads. The guard belongs to it for its whole life."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        #: The session of the ring that has used it last.
        self.session = 0
        self._guards: tuple[Any, ...] = ()

    def reclaim(self) -> None:
        """Blocks the host until no copy reads this buffer."""
        for event in self._guards:
            event.synchronize()
        self._guards = ()

    def guard(self, *events: Any) -> None:
        """Names the events after which the buffer may be written again; none where that is so now."""
        self._guards = events


class StagingRing:
    """Buffers of equal size that are used in turn. Made empty; ``open`` pins them, ``close`` unpins them.

    Not thread-safe: its owner holds a lock around every method.

    Args:
        accelerator: Pins the memory, and has events.
        dtype: What the buffers hold.
        chunk_elements: Elements in each buffer.
        buffers: Number of buffers.
        device_index: The device that copies out of the ring go to.
        counters: Where chunks, waits and casts are counted.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        dtype: torch.dtype,
        chunk_elements: int,
        buffers: int,
        device_index: int | None,
        counters: Counters,
    ) -> None:
        self._accelerator = accelerator
        self._dtype = dtype
        #: Elements in each buffer.
        self.chunk_elements = chunk_elements
        self._number = buffers
        self._device_index = device_index
        self._counters = counters
        self._buffers: list[StagingBuffer] = []
        self._next = 0
        self._session = 0
        self._unsettled = False

    @property
    def pinned_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in tuple(self._buffers))

    def open(self) -> None:
        """Pins the buffers.

        Raises:
            StrategyUnavailableError: Events cannot be made without arguments.
            RuntimeError: or what the accelerator raises, when memory cannot be pinned. What was
                pinned before that is given back by ``close``.
        """
        made(self._accelerator, "Event")  # here, where a copy can still take another way
        # Outside inference mode: a buffer made in it could not be written outside it later.
        with torch.inference_mode(False):
            for _ in range(self._number):
                memory = self._accelerator.pin_empty(self.chunk_elements, dtype=self._dtype)
                self._buffers.append(StagingBuffer(memory))
                if not self._is_pinned(memory):
                    raise RuntimeError(f"{self._accelerator.name}.pin_empty returned memory that is not pinned")

    def _is_pinned(self, memory: Tensor) -> bool:
        with contextlib.suppress(Exception):  # of a vendor that cannot say: copies are right in either case
            return self._accelerator.is_pinned(memory)
        return True

    def is_aligned(self, unit_bytes: int) -> bool:
        """Whether every buffer begins at a multiple of ``unit_bytes``."""
        return all(buffer.memory.data_ptr() % unit_bytes == 0 for buffer in self._buffers)

    @contextmanager
    def session(self) -> Iterator[None]:
        """The block in which buffers are taken and copies are queued, on the caller's current stream.

        A block that ends by an exception may leave copies in flight that no event guards; the next
        block, or ``close``, then waits for the whole device first.
        """
        self._settle()
        self._unsettled = True
        self._session += 1
        # Entering the stream makes the device current, so that events belong to it.
        with self._accelerator.stream(self._accelerator.current_stream(self._device_index)):
            yield
        self._unsettled = False

    def send(self, target: Tensor, values: Tensor) -> Any:
        """Casts one chunk into the next buffer, once that is free, and queues its copy to the device.

        Blocks the host for the buffer and for the cast.

        Args:
            target: On the device, of the ring's dtype, any strides.
            values: On the host, of the same shape, at most ``chunk_elements``; not read after the return.

        Returns:
            The event after which ``target`` holds the values.
        """
        buffer = self.acquire()
        started = time.perf_counter()
        staged = buffer.memory.narrow(0, 0, values.numel()).view(values.shape)
        staged.copy_(values)
        self._counters.add(pieces=1, cast_seconds=time.perf_counter() - started)
        self._accelerator.enqueue_copy(target, staged)
        event = self._accelerator.Event()  # type: ignore[misc]  # not None: has events
        event.record()
        buffer.guard(event)
        return event

    def acquire(self) -> StagingBuffer:
        """The next buffer, once no copy reads it any more. Blocks the host for that."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        started = time.perf_counter()
        self._reclaim(buffer)
        buffer.session = self._session
        self._counters.add(wait_seconds=time.perf_counter() - started)
        return buffer

    def close(self) -> None:
        """Waits for every copy out of the ring and unpins it. A ring is not used afterwards."""
        self._settle()
        for buffer in self._buffers:
            self._reclaim(buffer)
        while self._buffers:
            self._accelerator.unpin_memory(self._buffers[-1].memory)
            self._buffers.pop()

    def _reclaim(self, buffer: StagingBuffer) -> None:
        """Waits for the copy out of a buffer; where its event cannot be asked, for the device.

        Raises:
            Exception: What the event of a chunk of the same copy reports, or else the device.
        """
        try:
            buffer.reclaim()
        except Exception:
            if self._unsettled and buffer.session == self._session:
                raise
            self._accelerator.synchronize(self._device_index)
            buffer.guard()

    def _settle(self) -> None:
        if self._unsettled:
            self._accelerator.synchronize(self._device_index)
            for buffer in self._buffers:
                buffer.guard()
            self._unsettled = False
