"""Sets of time, made of many intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

_MANY = 100_000


class Intervals:
    """A union of half-open intervals. Those that touch become one, so that millions of kernels take little memory."""

    def __init__(self, intervals: Iterable[tuple[float, float]] = ()) -> None:
        self._merged: list[tuple[float, float]] = []
        self._added: list[tuple[float, float]] = list(intervals)

    def add(self, start: float, end: float) -> None:
        """Adds an interval."""
        self._added.append((start, end))
        if len(self._added) >= _MANY:
            self._merge()

    def parts(self) -> list[tuple[float, float]]:
        """The disjoint intervals of the union, in order."""
        self._merge()
        return self._merged

    def length(self) -> float:
        """Of all together."""
        return sum(end - start for start, end in self.parts())

    def within(self, start: float, end: float) -> float:
        """The length of what lies between two times."""
        parts, found = self.parts(), 0.0
        for left, right in parts[max(0, bisect_right(parts, (start, start)) - 1) :]:
            if left >= end:
                break
            found += max(0.0, min(right, end) - max(left, start))
        return found

    def without(self, other: Intervals) -> Intervals:
        """What of this union is not in another one."""
        found = Intervals()
        for start, end in self.parts():
            parts, at = other.parts(), start
            for left, right in parts[max(0, bisect_right(parts, (start, start)) - 1) :]:
                if left >= end:
                    break
                if left > at:
                    found.add(at, left)
                at = max(at, right)
            if at < end:
                found.add(at, end)
        return found

    def _merge(self) -> None:
        if not self._added:
            return
        merged: list[tuple[float, float]] = []
        for start, end in sorted([*self._merged, *self._added]):
            if merged and start <= merged[-1][1]:
                if end > merged[-1][1]:
                    merged[-1] = merged[-1][0], end
            elif end > start:
                merged.append((start, end))
        self._merged, self._added = merged, []


def union(many: Iterable[Intervals]) -> Intervals:
    """One of several."""
    return Intervals(part for each in many for part in each.parts())
