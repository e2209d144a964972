"""A queue whose work runs in the order that a schedule says, among those that the streams allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..overlap import bytes_of, span_bytes
from .late_queue import LateQueue, SimulatedStream
from .schedule import Schedule


class ScheduledQueue(LateQueue):
    """Asks the schedule whether a copy runs now or is held back, and which of several runs first.

    A copy that is held back is asked about again only where the answer can make a difference: where a byte that it
    reads or writes has changed, or where the host asks an event behind it. Marks and waits of streams run at once.

    Args:
        schedule: Makes the decisions of one run.
        kind_of: ``"device"``, ``"pinned"`` or ``"pageable"``, for the memory of a tensor.
    """

    def __init__(self, schedule: Schedule, kind_of: Callable[[Tensor], str]) -> None:
        super().__init__(seed=0)
        self._schedule = schedule
        self._kind_of = kind_of
        self._numbers: dict[Any, int] = {}  # of the copies, in the order in which they were queued
        self._held: dict[Any, bytes] = {}  # what a copy's memory held when it was held back
        self._memories: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that an address stays that of one storage

    def enqueue(self, stream: SimulatedStream, destination: Tensor, source: Tensor) -> None:
        with self.lock:
            super().enqueue(stream, destination, source)
            entry = stream.operations[-1]
            number = self._numbers[entry] = len(self._numbers) + 1
            reads, writes = self._named(source), self._named(destination)
            stream_number = self._streams.index(stream)
            self._schedule.queued(number, f"stream {stream_number}: reads {reads}, writes {writes}")

    def moment(self) -> None:
        with self.lock:
            while self._runs_one():
                pass

    def reach(self, marks: list[Any]) -> None:
        with self.lock:
            if self._copies_before(marks):
                self._schedule.waits()
            super().reach(marks)
            self.moment()

    def poll(self, mark: Any) -> bool:
        with self.lock:
            held = [self._numbers[entry] for entry in self._copies_before([mark])]
            if held and self._schedule.decide("runs when the host asks", min(held), 2):
                self.reach([mark])
            return super().poll(mark)

    def _choose(self, ready: list[tuple[SimulatedStream, Any]]) -> tuple[SimulatedStream, Any]:
        for stream, entry in ready:
            if entry.copy is None:
                return stream, entry
        ready.sort(key=lambda pair: self._numbers[pair[1]])
        first = self._numbers[ready[0][1]]
        return ready[self._schedule.decide("runs after another one", first, len(ready)) if len(ready) > 1 else 0]

    def _step(self, stream: SimulatedStream, entry: Any) -> None:
        super()._step(stream, entry)
        if entry.copy is not None:
            self._held.pop(entry, None)
            self._schedule.ran(self._numbers[entry], races=entry.races)

    def _runs_one(self) -> bool:
        """Runs one entry whose time has come, unless none is there."""
        heads = [(stream, entry) for stream in tuple(self._streams) if (entry := stream._next_entry()) is not None]
        for stream, entry in sorted(heads, key=lambda pair: self._numbers.get(pair[1], 0)):
            if entry.copy is None or self._is_let_run(entry):
                self._step(stream, entry)
                return True
        return False

    def _is_let_run(self, entry: Any) -> bool:
        content = b"".join(_content(tensor) for tensor in entry.copy)
        before = self._held.get(entry)
        if before is None:
            runs = not self._schedule.decide("is held back", self._numbers[entry], 2)
        else:
            asked = before != content or not self._schedule.pruned
            runs = asked and self._schedule.decide("runs later", self._numbers[entry], 2) == 1
        if not runs:
            self._held[entry] = content
        return runs

    def _copies_before(self, marks: list[Any]) -> list[Any]:
        """The copies that must run before these marks are done."""
        needed = self._needed(marks).items()
        return [entry for stream, count in needed for entry in tuple(stream.operations)[:count] if entry.copy]

    def _named(self, tensor: Tensor) -> str:
        """``pinned 1[0:12]``: the memory by its kind and number, and the bytes."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._memories:
            self._memories[storage.data_ptr()] = f"{self._kind_of(tensor)} {len(self._memories) + 1}"
            self._kept.append(tensor)
        begin = tensor.data_ptr() - storage.data_ptr()
        return f"{self._memories[storage.data_ptr()]}[{begin}:{begin + span_bytes(tensor)}]"


def _content(tensor: Tensor) -> bytes:
    return bytes(bytes_of(tensor.resolve_conj().resolve_neg().contiguous()).numpy())
