"""Streams and events whose work runs as late as the program allows.

Real devices run queued work at some moment between submission and the wait that needs it, so a
missing wait is wrong only sometimes. Here it is wrong always: nothing runs until a wait reaches it,
and then only what that wait needs. Where several streams are involved, each step's stream is drawn
from a seeded generator, and a stream other than the awaited one may run ahead of what is needed: that
is how work that should have waited for another stream is caught.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from torch import Tensor


class _Mark:
    """A point in one stream."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.done = False


@dataclass(eq=False)
class _Operation:
    """One entry of a stream: a copy, a mark to complete, or a mark of another stream to wait for."""

    run: Callable[[], None] | None = None
    tensors: tuple[Tensor, ...] = ()
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
                self._step(stream)
                needed[stream] = max(0, needed[stream] - 1)

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
            return [tensor for stream in self._streams for entry in stream.operations for tensor in entry.tensors]

    def _needed(self, marks: list[_Mark]) -> dict[SimulatedStream, int]:
        """How many operations of which streams must run before every one of ``marks`` is done."""
        needed: dict[SimulatedStream, int] = {}
        open_marks = [mark for mark in marks if not mark.done]
        while open_marks:
            mark = open_marks.pop()
            operations = mark.stream.operations
            before = needed.get(mark.stream, 0)
            count = next(index for index, entry in enumerate(operations, 1) if entry.completes is mark)
            needed[mark.stream] = max(before, count)
            awaited = (entry.awaits for entry in islice(operations, before, count))
            open_marks += [mark for mark in awaited if mark is not None and not mark.done]
        return needed

    def _step(self, stream: SimulatedStream) -> None:
        entry = stream.operations.popleft()
        if entry.run is not None:
            entry.run()
        if entry.completes is not None:
            entry.completes.done = True


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

    def enqueue(self, run: Callable[[], None], tensors: tuple[Tensor, ...]) -> None:
        with self._queue.lock:
            self.operations.append(_Operation(run=run, tensors=tensors))

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
