"""Streams and events whose work runs as late as the program allows.

Real devices run queued work at some moment between submission and the wait that needs it, so a
missing wait is wrong only sometimes. Here it is wrong always:

* Nothing runs until a wait of the host reaches it, and then only what that wait needs. Where several
  streams are involved, each step's stream is drawn from a seeded generator.
* Copies of different streams that touch the same memory, and that no event orders, are a race on a
  real device. Whatever order is drawn here, such a copy delivers poison in place of values.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ._memory_ranges import span_bytes


class _Mark:
    """A point in one stream."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.done = False

    def position(self) -> tuple[SimulatedStream, int]:
        """Its stream, and how many operations there lead up to it; it is not done."""
        entries = enumerate(self.stream.operations, 1)
        return self.stream, next(count for count, entry in entries if entry.completes is self)


@dataclass(eq=False)
class _Operation:
    """One entry of a stream: a copy, a mark to complete, or a mark of another stream to wait for."""

    copy: tuple[Tensor, Tensor] | None = None  # destination and source
    races: bool = False
    completes: _Mark | None = None
    awaits: _Mark | None = None


class LateQueue:
    """All streams of one simulated device, and the only place where their work is run.

    Args:
        seed: Fixes every choice of order.
    """

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._streams: list[SimulatedStream] = []
        self._steps = 0
        self._current = threading.local()
        self.default_stream = SimulatedStream(self)

    @property
    def current_stream(self) -> SimulatedStream:
        return getattr(self._current, "stream", self.default_stream)

    @contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        """Makes ``stream`` the calling thread's current one for the block."""
        before = self.current_stream
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def add(self, stream: SimulatedStream) -> None:
        with self.lock:
            self._streams.append(stream)

    def mark(self, stream: SimulatedStream) -> _Mark:
        with self.lock:
            mark = _Mark(stream)
            stream.operations.append(_Operation(completes=mark))
            return mark

    def enqueue(self, stream: SimulatedStream, destination: Tensor, source: Tensor) -> None:
        """Queues a copy on ``stream``, and notes the races it is part of."""
        with self.lock:
            new = _Operation(copy=(destination, source))
            before = self._closure([(stream, len(stream.operations))])
            for other in self._streams:
                for old in islice(other.operations, before.get(other, 0), None):
                    if other is not stream and old.copy is not None:
                        self._note_race(old, new)
            stream.operations.append(new)

    def reach(self, marks: list[_Mark]) -> None:
        """Runs work, late and in a seeded order, until every one of ``marks`` is done."""
        with self.lock:
            awaited = {mark.stream for mark in marks}
            needed = self._needed(marks)
            while any(needed.values()):
                # A stream that is only waited through may run past what is needed of it; one that
                # is awaited itself must not, or a missing host-side wait could go unnoticed.
                ready = [
                    stream
                    for stream, count in needed.items()
                    if (count or stream not in awaited) and stream.head_can_run()
                ]
                stream = self._random.choice(ready)
                steps = self._steps
                self._step(stream)
                needed[stream] = max(0, needed[stream] - 1)
                if self._steps != steps + 1:  # a finalizer of what was freed has waited in here, too
                    needed = self._needed(marks)

    def reach_all(self) -> None:
        """Runs everything that is queued on any stream."""
        with self.lock:
            self.reach([self.mark(stream) for stream in self._streams])

    def advance(self, mark: _Mark) -> None:
        """Runs one operation on the way to ``mark``: so that a loop of queries ends."""
        with self.lock:
            for stream, count in self._needed([mark]).items():
                if count and stream.head_can_run():
                    self._step(stream)
                    return

    def pending_tensors(self) -> list[Tensor]:
        """Every tensor that a queued copy will still read or write."""
        with self.lock:
            return [tensor for stream in self._streams for entry in stream.operations for tensor in entry.copy or ()]

    def _needed(self, marks: list[_Mark]) -> dict[SimulatedStream, int]:
        """How many operations of which streams must run before every one of ``marks`` is done."""
        return self._closure([mark.position() for mark in marks if not mark.done])

    def _closure(self, wanted: list[tuple[SimulatedStream, int]]) -> dict[SimulatedStream, int]:
        """Adds what the first operations of these streams wait for, and what that waits for."""
        needed: dict[SimulatedStream, int] = {}
        while wanted:
            stream, count = wanted.pop()
            before = needed.get(stream, 0)
            needed[stream] = max(before, count)
            awaited = (entry.awaits for entry in islice(stream.operations, before, count))
            wanted += [mark.position() for mark in awaited if mark is not None and not mark.done]
        return needed

    @staticmethod
    def _note_race(old: _Operation, new: _Operation) -> None:
        assert old.copy is not None  # noqa: S101 - for the type checker
        assert new.copy is not None  # noqa: S101 - likewise
        (old_written, old_read), (new_written, new_read) = old.copy, new.copy
        if _share_memory(new_written, old_read):
            old.races = True
        if _share_memory(new_read, old_written) or _share_memory(new_written, old_written):
            new.races = True

    def _step(self, stream: SimulatedStream) -> None:
        entry = stream.operations.popleft()
        self._steps += 1
        if entry.copy is not None:
            run_copy(*entry.copy, poisoned=entry.races)
        if entry.completes is not None:
            entry.completes.done = True


def run_copy(destination: Tensor, source: Tensor, poisoned: bool = False) -> None:
    """The copy itself, now; with ``poisoned``, NaNs (or -1) in place of the values."""
    with torch.no_grad():
        if poisoned:
            destination.fill_(float("nan") if destination.is_floating_point() else -1)
        else:
            destination.copy_(source)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the spans of two host tensors overlap: exact enough for whole chunks."""
    return a.data_ptr() < b.data_ptr() + span_bytes(b) and b.data_ptr() < a.data_ptr() + span_bytes(a)


class SimulatedStream:
    """A queue whose work runs in order, and late. Made by ``SimulatedAccelerator.Stream()``."""

    def __init__(self, queue: LateQueue) -> None:
        self._queue = queue
        self.operations: deque[_Operation] = deque()
        queue.add(self)

    def head_can_run(self) -> bool:
        """Whether there is work here whose turn has come."""
        head = self.operations[0] if self.operations else None
        return head is not None and (head.awaits is None or head.awaits.done)

    def synchronize(self) -> None:
        """Runs everything queued here, and what that waits for."""
        self._queue.reach([self._queue.mark(self)])

    def query(self) -> bool:
        """Whether nothing is queued here; if something is, one operation of it runs afterwards."""
        with self._queue.lock:
            if not self.operations:
                return True
            self._queue.advance(self._queue.mark(self))
            return False

    def wait_event(self, event: SimulatedEvent) -> None:
        """Work queued here from now on runs after what ``event`` marks at this moment."""
        if event.mark is not None:
            with self._queue.lock:
                self.operations.append(_Operation(awaits=event.mark))

    def wait_stream(self, other: SimulatedStream) -> None:
        """Work queued here from now on runs after everything queued on ``other`` so far."""
        with self._queue.lock:
            self.operations.append(_Operation(awaits=self._queue.mark(other)))


class SimulatedEvent:
    """A mark in a simulated stream. Made by ``SimulatedAccelerator.Event()``."""

    def __init__(self, queue: LateQueue) -> None:
        self._queue = queue
        self.mark: _Mark | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Marks what is queued so far on ``stream``, or on the current one."""
        self.mark = self._queue.mark(stream or self._queue.current_stream)

    def synchronize(self) -> None:
        """Runs what is marked. An event that was never recorded has nothing to wait for."""
        if self.mark is not None:
            self._queue.reach([self.mark])

    def query(self) -> bool:
        """Whether what is marked has run; if not, one operation of it runs after answering."""
        if self.mark is None or self.mark.done:
            return True
        self._queue.advance(self.mark)
        return False

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """``stream.wait_event(self)``, for ``stream`` or the current one."""
        (stream or self._queue.current_stream).wait_event(self)
