"""Streams and events whose work runs as late as the program allows.

Real devices run queued work at some moment between submission and the wait that needs it, so a
missing wait is wrong only sometimes. Here it is wrong always:

* Nothing runs until a wait of the host reaches it, and then only what that wait needs. Where several
  streams are involved, each step's stream is drawn from a seeded generator.
* Copies of different streams that share memory, and that neither an event nor a wait of the host
  orders, are a race on a real device. Here such a copy delivers poison in place of values.
"""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..overlap import address, share_elements, span_bytes


class _Mark:
    """A point in one stream."""

    def __init__(self, stream: SimulatedStream, never: bool = False) -> None:
        self.stream = stream
        self.never = never  # recorded with a graph: it cannot be asked
        self.done = False
        self.polls = 0

    def position(self) -> tuple[SimulatedStream, int]:
        """Its stream, and how many operations there lead up to it; it is not done."""
        entries = enumerate(tuple(self.stream.operations), 1)
        return self.stream, next((count for count, entry in entries if entry.completes is self), 0)


@dataclass(eq=False)
class _Operation:
    """One entry of a stream: a copy, a mark to complete, or a mark of another stream to wait for."""

    copy: tuple[Tensor, Tensor] | None = None  # destination and source
    spans: tuple[int, int, int, int] = (0, 0, 0, 0)  # where the destination begins and ends, and the source
    races: bool = False
    completes: _Mark | None = None
    awaits: _Mark | None = None
    ran: bool = False

    def run(self) -> None:
        if self.copy is not None:
            deliver = delivery(*self.copy, poisoned=self.races)
            with torch.no_grad():
                # One C call right after the question: a signal handler that waits may have run it before.
                self.ran or deliver()
        self.ran = True
        if self.completes is not None:
            self.completes.done = True


class LateQueue:
    """All streams of one simulated device, and the only place where their work is run.

    Args:
        seed: Fixes every choice of order.
    """

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.capturing = False
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
            mark = _Mark(stream, never=self.capturing)
            stream.operations.append(_Operation(completes=mark))
            return mark

    def enqueue(self, stream: SimulatedStream, destination: Tensor, source: Tensor) -> None:
        """Queues a copy on ``stream``, and notes the races it is part of."""
        with self.lock:
            self._check_capture()
            new = _Operation(copy=(destination, source), spans=(*_span(destination), *_span(source)))
            begin, end, read_begin, read_end = new.spans
            ordered = self._closure([(stream, len(stream.operations))])  # these run before the copy
            for other in self._streams:
                if other is stream:
                    continue
                for old in tuple(other.operations)[ordered.get(other, 0) :]:
                    old_begin, old_end, old_read_begin, old_read_end = old.spans
                    # The cheap check of whole spans first: there may be thousands of pairs.
                    if (
                        (begin < old_end and old_begin < end)
                        or (begin < old_read_end and old_read_begin < end)
                        or (read_begin < old_end and old_begin < read_end)
                    ):
                        self._note_race(old, new)
            stream.operations.append(new)

    def reach(self, marks: list[_Mark]) -> None:
        """Runs work, late and in a seeded order, until every one of ``marks`` is done.

        May be entered again at any point by the same thread, from a signal handler or a finalizer.
        """
        with self.lock:
            self._check_capture(*marks)
            needed = self._needed(marks)
            while any(needed.values()):
                steps = self._steps
                ready = [
                    (stream, entry)
                    for stream, count in needed.items()
                    if count and (entry := stream._next_entry()) is not None
                ]
                if ready:
                    stream, entry = self._choose(ready)
                    self._step(stream, entry)
                    needed[stream] -= 1
                if self._steps != steps + 1:  # another reach has run inside this one
                    needed = self._needed(marks)

    def reach_all(self) -> None:
        """Runs everything that is queued on any stream."""
        with self.lock:
            self.reach([self.mark(stream) for stream in self._streams])

    def poll(self, mark: _Mark) -> bool:
        """Whether ``mark`` is done. Asking as often as work is left before it gets it done."""
        with self.lock:
            self._check_capture(mark)
            mark.polls += 1
            if not mark.done and mark.polls > sum(self._needed([mark]).values()):
                self.reach([mark])
            return mark.done

    def moment(self) -> None:
        """The host has just queued something. A device may run what it likes now; this one runs nothing."""

    def pending_tensors(self) -> list[Tensor]:
        """Every tensor that a queued copy will still read or write."""
        with self.lock:
            return [tensor for stream in self._streams for entry in stream.operations for tensor in entry.copy or ()]

    def _choose(self, ready: list[tuple[SimulatedStream, _Operation]]) -> tuple[SimulatedStream, _Operation]:
        """Which of the entries whose turn it is runs first."""
        return self._random.choice(ready)

    def _check_capture(self, *marks: _Mark) -> None:
        if self.capturing:
            raise RuntimeError("operation not permitted while a graph is recorded")
        if any(mark.never for mark in marks):
            raise RuntimeError("operation not permitted on an event that was recorded with a graph")

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
            awaited = (entry.awaits for entry in tuple(stream.operations)[before:count])
            wanted += [mark.position() for mark in awaited if mark is not None and not mark.done]
        return needed

    @staticmethod
    def _note_race(old: _Operation, new: _Operation) -> None:
        assert old.copy is not None  # noqa: S101 - for the type checker
        assert new.copy is not None  # noqa: S101 - for the type checker
        (old_written, old_read), (new_written, new_read) = old.copy, new.copy
        both_write = share_elements(new_written, old_written)
        if both_write or share_elements(new_written, old_read):
            old.races = True
        if both_write or share_elements(new_read, old_written):
            new.races = True

    def _step(self, stream: SimulatedStream, entry: _Operation) -> None:
        """Runs the entry that is next in the stream, unless a reach inside this one has done so."""
        entry.run()
        with suppress(ValueError):
            stream.operations.remove(entry)
            self._steps += 1


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = address(tensor)
    return begin, begin + span_bytes(tensor)


def delivery(destination: Tensor, source: Tensor, poisoned: bool = False) -> Callable[[], Any]:
    """The copy, to be called; with ``poisoned``, of wrong values: NaN, -1, or the opposite truth value."""
    if not poisoned:
        return functools.partial(destination.copy_, source)
    if destination.dtype == torch.bool:
        return functools.partial(destination.copy_, source.logical_not())
    if destination.element_size() == 1:
        return functools.partial(destination.view(torch.uint8).fill_, 0xFF)
    has_nan = destination.is_floating_point() or destination.is_complex()
    return functools.partial(destination.fill_, float("nan") if has_nan else -1)


class SimulatedStream:
    """A queue whose work runs in order, and late. Made by ``SimulatedAccelerator.Stream()``."""

    def __init__(self, queue: LateQueue) -> None:
        self._queue = queue
        self.operations: deque[_Operation] = deque()
        queue.add(self)

    def _next_entry(self) -> _Operation | None:
        """The work whose turn has come, or None where there is none or it has to wait."""
        head = next(iter(tuple(self.operations)), None)
        return None if head is None or (head.awaits is not None and not head.awaits.done) else head

    def synchronize(self) -> None:
        """Runs everything queued here, and what that waits for."""
        self._queue.reach([self._queue.mark(self)])

    def query(self) -> bool:
        """Whether nothing is queued here. Asking often enough gets it done."""
        with self._queue.lock:
            last = next((entry.completes for entry in reversed(tuple(self.operations)) if entry.completes), None)
            if not self.operations:
                return True
            if last is None or self.operations[-1].completes is not last:
                last = self._queue.mark(self)
            return self._queue.poll(last)

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
        """Whether what is marked has run. Asking as often as work is left before it gets it done."""
        return self.mark is None or self._queue.poll(self.mark)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """``stream.wait_event(self)``, for ``stream`` or the current one."""
        (stream or self._queue.current_stream).wait_event(self)
