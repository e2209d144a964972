"""Values by ranges of addresses, found in logarithmic time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class AddressRanges(Generic[ValueT]):
    """A set of ranges that share no byte, each with a value.

    Changes need a lock of the caller's. ``covering`` needs none: a look-up beside a change finds the range or not.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []  # sorted
        self._ranges: dict[int, tuple[int, ValueT]] = {}  # by begin: size and value
        #: The sum of the sizes.
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, begin: int, num_bytes: int, value: ValueT) -> None:
        """Adds a range, which must overlap no other."""
        self._ranges[begin] = num_bytes, value
        insort(self._begins, begin)
        self.total_bytes += num_bytes

    def remove(self, begin: int) -> bool:
        """Whether a range began at exactly this address; it is gone now."""
        if begin not in self._ranges:
            return False
        del self._begins[bisect_left(self._begins, begin)]
        self.total_bytes -= self._ranges.pop(begin)[0]
        return True

    def size_at(self, begin: int) -> int | None:
        """The size of the range that begins at exactly this address, or None."""
        found = self._ranges.get(begin)
        return None if found is None else found[0]

    def covering(self, begin: int, num_bytes: int) -> ValueT | None:
        """The value of the range that holds all of these bytes, or None."""
        index = bisect_right(self._begins, begin)
        for start in self._begins[max(index - 1, 0) : index]:  # one, or none
            found = self._ranges.get(start)
            if found is not None and begin + num_bytes <= start + found[0]:
                return found[1]
        return None

    def overlapping(self, begin: int, num_bytes: int) -> list[ValueT]:
        """The values of all ranges that share a byte with this one."""
        first = max(bisect_right(self._begins, begin) - 1, 0)
        starts = self._begins[first : bisect_left(self._begins, begin + num_bytes)]
        return [self._ranges[start][1] for start in starts if begin < start + self._ranges[start][0]]
