"""The buffers on the host in which reductions accumulate gradients: DeepSpeed's, and perhaps a second one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection

import torch
from torch import Tensor

from ...errors import run_all
from ...interface import HostToDeviceTransfer
from .master_gradient import Piece


class Buffers(list[Tensor]):
    """One buffer or two, flat and equally long; the device reads and writes all of each directly.

    Args:
        first: DeepSpeed's own.
        transfer: Page-locks what is not pinned.
    """

    def __init__(self, first: Tensor, transfer: HostToDeviceTransfer) -> None:
        super().__init__()
        self._transfer = transfer
        self._prepared: list[Tensor] = []
        self.append(first)

    def append(self, buffer: Tensor) -> None:
        """Adds a buffer. Blocks while it is page-locked, if it is not pinned."""
        self._prepare(buffer)
        super().append(buffer)

    def use(self, transfer: HostToDeviceTransfer) -> None:
        """Lets another transfer page-lock them. Blocks. Where that fails, the one before does again, if it can."""
        before = self._transfer
        self.unprepare()
        try:
            self._transfer = transfer
            for buffer in self:
                self._prepare(buffer)
        except BaseException:
            with contextlib.suppress(Exception):
                self.unprepare()
            self._transfer = before
            for buffer in self:
                with contextlib.suppress(Exception):
                    self._prepare(buffer)
            raise

    def unprepare(self) -> None:
        """Undoes every page-lock. Idempotent."""
        prepared, self._prepared = self._prepared, []
        run_all([functools.partial(self._transfer.unprepare, buffer) for buffer in prepared])

    def prepare(self) -> None:
        """Page-locks again what the transfer has given back meanwhile, as when it was closed. Blocks then."""
        for buffer in self._prepared:
            self._transfer.prepare(buffer)

    def part(self, piece: Piece, begin: int) -> Tensor:
        """What is accumulated for a parameter whose part of each buffer begins at ``begin``."""
        return self[piece.current].narrow(0, begin, piece.parameter.numel)

    def extremes(self, pieces: Collection[tuple[Piece, int]]) -> Tensor | None:
        """The least and the greatest of what is accumulated, once or for each of several parts; None where nothing is.

        Blocks while all of it is read once. Infinities and NaNs are among the extremes.

        Args:
            pieces: Those that may lie in another buffer than the first, and where they begin.
        """
        used = {piece.current for piece, _ in pieces} or {0}
        covered = sum(piece.parameter.numel for piece, _ in pieces)
        if used == {0} or (len(used) == 1 and covered == self[0].numel()):
            parts = [self[used.pop()]]
        else:
            parts = [*(self.part(*each) for each in pieces), *self._others(pieces)]
        found = [extreme for part in parts if part.numel() for extreme in torch.aminmax(part)]
        return torch.stack(found) if found else None

    def _others(self, pieces: Collection[tuple[Piece, int]]) -> list[Tensor]:
        """The parts of the first buffer that are none of ``pieces``."""
        others, end = [], 0
        for begin, numel in sorted((begin, piece.parameter.numel) for piece, begin in pieces):
            others.append(self[0].narrow(0, end, begin - end))
            end = begin + numel
        return [*others, self[0].narrow(0, end, self[0].numel() - end)]

    def _prepare(self, buffer: Tensor) -> None:
        if buffer.numel() and not self._transfer.accelerator.is_pinned(buffer):
            self._prepared.append(buffer)  # first, so that an interrupt leaves none behind
            self._transfer.prepare(buffer)
