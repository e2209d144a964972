"""Which elements of a copy are compared, and what the host itself makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from ..memory.chunks import flat_view, pairs_from, plan_chunks, views_of_range
from ..nvme.reading import read_range
from ..nvme.swapped_tensor import SwappedTensor

#: The most bytes of a destination that one sample takes.
SAMPLE_BYTES = 2**13
#: Elements of a row where one gather takes all rows: fp32 sources then have a cache line for each.
_ROW = 16
#: Rows where each of them is a read of its own: from a file, or where strides allow no flat view.
_LONG_ROWS = 16
#: Elements that the host casts at a time where it casts everything.
_CHUNK_ELEMENTS = 2**20


class Part(NamedTuple):
    """Elements of one copy, read back by one operation.

    Attributes:
        target: Where they are: a view of the destination.
        expected: What they must be: contiguous host memory of the same shape and dtype.
        first: Index of the first of them in the destination, in logical order.
        row: How many follow each other before there is a gap.
        spacing: From the beginning of one row to that of the next.
    """

    target: Tensor
    expected: Tensor
    first: int
    row: int
    spacing: int

    def locate(self, position: int) -> int:
        """Index in the destination of the element at this position of the part."""
        return self.first + position // self.row * self.spacing + position % self.row


def sample(destination: Tensor, source: Tensor | SwappedTensor, random: Random) -> list[Part]:
    """A part of a copy: rows at equal distances, the first at a random place, and the elements behind the last row.

    Every element is as likely as every other. A stretch of wrong elements that is longer than the distance is found
    for certain. A copy of at most ``SAMPLE_BYTES`` is compared as a whole.

    Args:
        destination: Of at least one element.
        source: In host memory, or in a file.
        random: Chooses the place.
    """
    numel = destination.numel()
    room = SAMPLE_BYTES // destination.element_size()
    target = flat_view(destination)
    values = flat_view(source) if isinstance(source, Tensor) else None
    if target is None or values is None:
        row = room // _LONG_ROWS
        begin, spacing = _comb(numel // row, _LONG_ROWS - 1, random)
        runs = [(each * row, row) for each in range(begin, numel // row, spacing)]
        return list(_parts(destination, source, [*runs, *_rest(numel, row)]))
    rows = numel // _ROW
    begin, spacing = _comb(rows, room // _ROW - 1, random)
    parts = []
    if rows:
        here, there = (flat.narrow(0, 0, rows * _ROW).view(rows, _ROW)[begin::spacing] for flat in (target, values))
        expected = _cast(torch.empty(here.shape, dtype=here.dtype, device="cpu"), there)
        parts.append(Part(here, expected, begin * _ROW, _ROW, spacing * _ROW))
    return [*parts, *_parts(target, values, _rest(numel, _ROW))]


def everything(destination: Tensor, source: Tensor | SwappedTensor) -> list[Part]:
    """All of a copy. The parts hold as many bytes of host memory as the destination has."""
    return list(_parts(destination, source, plan_chunks(destination.numel(), _CHUNK_ELEMENTS)))


def _comb(rows: int, most: int, random: Random) -> tuple[int, int]:
    """The first row, and the distance between two, so that there are at most ``most``."""
    spacing = max(1, -(-rows // most))
    return random.randrange(spacing), spacing


def _rest(numel: int, row: int) -> list[tuple[int, int]]:
    """What is left behind the last whole row, where remainders of loops are."""
    return [(numel - numel % row, numel % row)] if numel % row else []


def _parts(destination: Tensor, source: Tensor | SwappedTensor, ranges: Iterable[tuple[int, int]]) -> Iterator[Part]:
    """Contiguous ranges, given by their first element and their length."""
    for first, length in ranges:
        if isinstance(source, SwappedTensor):
            views = iter([read_range(source, first, length)])
        else:
            views = views_of_range(source, first, first + length)
        cast = torch.empty(length, dtype=destination.dtype, device="cpu")
        done = 0
        for view in views:
            _cast(cast.narrow(0, done, view.numel()).view(view.shape), view)
            done += view.numel()
        for target, expected in pairs_from(destination, first, cast):
            yield Part(target, expected, first, length, length)
            first += target.numel()


def _cast(memory: Tensor, values: Tensor) -> Tensor:
    """The host's own cast, in memory of the dtype that is wanted."""
    return memory.copy_(values)
