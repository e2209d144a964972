"""Two stages one behind the other with a ring of buffers between them, and times between those that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def ring_seconds(
    chunks: int, fill: float, drain: float, buffers: int, rest: tuple[float, float] | None = None
) -> tuple[float, float]:
    """When the last chunk has been filled, and when it has been drained.

    One chunk is filled at a time and one drained at a time, in order; a buffer is filled again once it is
    drained.

    Args:
        chunks: Equal ones.
        fill: Seconds for each of them.
        drain: Likewise.
        buffers: In the ring.
        rest: ``fill`` and ``drain`` of one more, shorter chunk.
    """
    pace = max(fill, drain) if buffers > 1 else fill + drain

    def drained(count: int) -> float:
        return fill + drain + (count - 1) * pace if count > 0 else 0.0

    def filled(count: int) -> float:
        return max(count * fill, drained(count - buffers) + fill) if count > 0 else 0.0

    if rest is None:
        return filled(chunks), drained(chunks)
    last_filled = max(filled(chunks), drained(chunks + 1 - buffers)) + rest[0]
    return last_filled, max(last_filled, drained(chunks)) + rest[1]


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds for ``size``, from measured pairs of rising size and seconds.

    Straight lines in between. Beyond the largest at its rate. Below the smallest on the line through the
    first two, as a fixed cost and a rate would be, but at no better rate than the smallest.
    """
    smallest, largest = points[0], points[-1]
    if size >= largest[0]:
        return largest[1] * size / largest[0]
    if size < smallest[0]:
        in_proportion = smallest[1] * size / smallest[0]
        if len(points) == 1:
            return in_proportion
        return min(smallest[1], max(in_proportion, _on_line(smallest, points[1], size)))
    pair = next(pair for pair in pairwise(points) if size <= pair[1][0])
    return _on_line(*pair, size)


def _on_line(first: tuple[float, float], second: tuple[float, float], size: float) -> float:
    return first[1] + (size - first[0]) * (second[1] - first[1]) / (second[0] - first[0])
