"""The fp32 gradient of one master, made from what was accumulated."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..stage3 import Parameter

#: A gradient that was not reduced for as many steps gets memory of its own, as in DeepSpeed: the list must end.
MOST_FACTORS = 8


@dataclass(eq=False)
class Piece:
    """The gradient of one parameter.

    Attributes:
        parameter: Whose it is, and where it lies.
        current: The buffer that reductions write, or wrote last.
        final: The buffer with what the last reduction before a step left; DeepSpeed's fp32 buffer has its cast.
        since: How many of the master's factors were there before that reduction; those that follow apply.
        own: The fp32 values themselves, where they are not the cast of ``final``: somebody has set them.
        is_zero: Whether it is known to be zero: it was never reduced.
        arrival: The event after which the host has what was reduced last, or None.
    """

    parameter: Parameter
    current: int = 0
    final: int = 0
    since: int = 0
    own: Tensor | None = None
    is_zero: bool = True
    arrival: Any = None


class MasterGradient:
    """The gradient that DeepSpeed would keep in fp32 for one master, bit for bit, at any moment.

    DeepSpeed writes it at the last reduction before a step, and multiplies it in place in each step. A parameter that
    was not reduced again keeps the product, and is updated with it. So the factors of all steps since then are applied
    one after the other.

    Args:
        buffers: What reductions write: flat, equally long. A list that may grow.
        base: Where this master's part of each begins, in elements.
        parameters: Its parameters, one after the other.
        dtype: Of the gradient.
        settle: Called before buffers are read; blocks until they hold what was copied there.
        is_reduced: Whether a write to a piece is that of a reduction, and so the cast of what is accumulated there.
        make: Makes real memory when it is needed: gets the values, and puts them in the place of the lazy ones.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        base: int,
        parameters: Sequence[Parameter],
        dtype: torch.dtype,
        settle: Callable[[], None],
        is_reduced: Callable[[Piece], bool],
        make: Callable[[MasterGradient], Tensor],
    ) -> None:
        self.dtype = dtype
        self.pieces = [Piece(each) for each in parameters if each.numel]
        self.numel = sum(each.numel for each in parameters)
        self._buffers, self._base = buffers, base
        self._settle, self._is_reduced, self._make = settle, is_reduced, make
        self._offsets = [each.parameter.offset for each in self.pieces]
        self._factors: list[float] = []
        self._memory: Tensor | None = None

    @property
    def memory(self) -> Tensor | None:
        """The real gradient, which counts from the moment when it was made; or None."""
        return self._memory

    def read(self, offset: int, length: int, out: Tensor | None = None) -> Tensor:
        """The values of a range; not to be written. Blocks while they are made.

        Args:
            offset: Where the range begins, in elements.
            length: Its elements.
            out: Where values are made, if they must be: flat, of ``dtype``, at least ``length`` elements.
        """
        if self._memory is not None:
            return self._memory.narrow(0, offset, length)
        self._settle()
        made = torch.empty(length, dtype=self.dtype, device="cpu") if out is None else out.narrow(0, 0, length)
        for piece, begin, end in self._runs(offset, offset + length):
            part = made.narrow(0, begin - offset, end - begin)
            if piece.own is not None:
                part.copy_(piece.own.narrow(0, begin - piece.parameter.offset, end - begin))
                continue
            part.copy_(self._buffers[piece.final].narrow(0, self._base + begin, end - begin))
            for factor in self._factors[piece.since :]:
                part.mul_(factor)
        return made

    def write(self, offset: int, values: Tensor) -> None:
        """Sets a range, until its parameters are reduced again. Blocks until the values are here."""
        if self._memory is not None:
            self._memory.narrow(0, offset, values.numel()).copy_(values)
            return
        for piece, begin, stop in self._pieces_of(offset, offset + values.numel()):
            if not self._is_reduced(piece):
                self._own(piece).narrow(0, begin - piece.parameter.offset, stop - begin).copy_(
                    values.narrow(0, begin - offset, stop - begin)
                )

    def scale(self, factor: float) -> None:
        """Multiplies all of it, as ``mul_`` does."""
        if self._memory is not None:
            self._memory.mul_(factor)
        elif factor != 1.0:  # else each value stays what it is
            for piece in self.pieces:
                if piece.own is not None:
                    piece.own.mul_(factor)
                elif piece.is_zero and not math.isfinite(factor):
                    piece.is_zero = False  # and no zero any more
            self._factors.append(factor)
            if len(self._factors) > MOST_FACTORS:
                self._shorten()

    def reduced(self, piece: Piece) -> None:
        """What was accumulated for a parameter is its gradient from now on."""
        piece.final, piece.since = piece.current, len(self._factors)
        piece.own, piece.is_zero = None, False

    def hold(self) -> Tensor:
        """The gradient in memory of its own, which counts from now on. Blocks while it is made, once."""
        if self._memory is None:
            self._memory = self._make(self)
            self._factors.clear()
            for piece in self.pieces:
                piece.own = None
        return self._memory

    def _own(self, piece: Piece) -> Tensor:
        if piece.own is None:
            piece.own = self.read(piece.parameter.offset, piece.parameter.numel)
        return piece.own

    def _shorten(self) -> None:
        """Drops the factors that apply to no piece; a piece to which too many apply gets memory of its own."""
        applied = len(self._factors)
        for piece in self.pieces:
            if piece.is_zero:
                piece.since = applied
            elif piece.own is None and applied - piece.since > MOST_FACTORS // 2:
                self._own(piece)
        rest = min((each.since for each in self.pieces if each.own is None), default=applied)
        del self._factors[:rest]
        for piece in self.pieces:
            piece.since = max(0, piece.since - rest)

    def _runs(self, begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces of a range, those together that are made in one way: any one of them, and where they lie."""
        run: tuple[Piece, int, int] | None = None
        for piece, start, stop in self._pieces_of(begin, end):
            if run is not None and _alike(run[0], piece):
                run = (piece, run[1], stop)
                continue
            if run is not None:
                yield run
            run = (piece, start, stop)
        if run is not None:
            yield run

    def _pieces_of(self, begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces of a range, and which elements of it each has; takes no time for the others."""
        for index in range(max(0, bisect.bisect_right(self._offsets, begin) - 1), len(self.pieces)):
            _, offset, numel = self.pieces[index].parameter
            start, stop = max(begin, offset), min(end, offset + numel)
            if start >= stop:
                return
            yield self.pieces[index], start, stop


class StepGradient:
    """A master's gradient in one step, whose factors go with it: that of a sub-group whose state is in files.

    DeepSpeed reads the gradient of such a one anew in each step, scales it in a swap buffer, and drops it.

    Args:
        gradient: Stays as it is.
    """

    def __init__(self, gradient: MasterGradient) -> None:
        self.dtype, self.numel = gradient.dtype, gradient.numel
        self._gradient = gradient
        self._factors: list[float] = []

    def read(self, offset: int, length: int, out: Tensor | None = None) -> Tensor:
        """As that of ``MasterGradient``, times the factors."""
        buffer = torch.empty(length, dtype=self.dtype, device="cpu") if out is None else out.narrow(0, 0, length)
        made = self._gradient.read(offset, length, buffer)
        if made.data_ptr() != buffer.data_ptr():
            buffer.copy_(made)
        for factor in self._factors:
            buffer.mul_(factor)
        return buffer

    def scale(self, factor: float) -> None:
        """Multiplies all of it, as ``mul_`` does."""
        if factor != 1.0:
            self._factors.append(factor)

    def write(self, offset: int, values: Tensor) -> None:
        """Cannot be: nobody's code runs between a step's scaling and its updates.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"elements {offset} to {offset + values.numel()} of a gradient cannot be set in a step")

    def hold(self) -> Tensor:
        """A copy in memory."""
        return self.read(0, self.numel)


def _alike(one: Piece, other: Piece) -> bool:
    return one.own is None is other.own and (one.final, one.since) == (other.final, other.since)
