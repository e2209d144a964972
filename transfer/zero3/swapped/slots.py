"""Memory that tiles of optimizer state pass through, on their way from files and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from ...in_flight import InFlightCopy
from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of, round_up
from ...nvme.threads import run_on
from .state_file import StateFile

#: Of one read or write by one thread: fewer cost more in Python's lock than drives need.
REQUEST_BYTES = 2**22
_ELEMENT_BYTES = 4  # fp32


@dataclass(frozen=True)
class Tile:
    """A part of a sub-group's state.

    Attributes:
        sub_group_id: Whose it is.
        offset: Where it begins, in elements.
        length: Its elements.
        files: Of the master, the first and the second moments.
        is_last: Whether its sub-group ends there.
    """

    sub_group_id: int
    offset: int
    length: int
    files: Sequence[StateFile] = field(repr=False)
    is_last: bool


class Slot:
    """Memory for one tile.

    It is free, or being read; then the optimizer updates it; then it is being written, and the device reads the master.

    Args:
        elements: Of the largest tile.

    Attributes:
        tensors: Master, first and second moments: flat, fp32, ``elements`` each, zero at first.
        tile: What is in it, or on its way; None where it is free.
        copy: The copy to the device that reads it, if there is one.
    """

    def __init__(self, elements: int) -> None:
        num_bytes = round_up(elements * _ELEMENT_BYTES, ALIGNMENT_BYTES)
        self._memory = [aligned_empty(num_bytes).zero_() for _ in range(3)]
        self.tensors = [memory.view(torch.float32) for memory in self._memory]
        self.tile: Tile | None = None
        self.copy: InFlightCopy | None = None
        self._requests: list[Future[None]] = []

    @property
    def num_bytes(self) -> int:
        """Of its memory."""
        return sum(memory.nbytes for memory in self._memory)

    def read(self, pool: ThreadPoolExecutor, tile: Tile) -> None:
        """Starts to read a tile."""
        self._start(pool, StateFile.read, tile)

    def write(self, pool: ThreadPoolExecutor, tile: Tile) -> None:
        """Starts to write its tile."""
        self._start(pool, StateFile.write, tile)

    @property
    def is_idle(self) -> bool:
        """Whether it is neither read nor written now, and no device reads it."""
        return all(each.done() for each in self._requests) and (self.copy is None or self.copy.done)

    def wait(self) -> None:
        """Blocks until it is neither read nor written.

        Raises:
            SwapError: The first error of a request; all have ended.
        """
        errors = [each.exception() for each in self._requests]
        self._requests = []
        for error in errors:
            if error is not None:
                raise error

    def free(self) -> None:
        """Blocks until no device reads it; then it has no tile."""
        if self.copy is not None:
            try:
                self.copy.release_source()
            except Exception:
                self.copy = None  # the device is idle then
                raise
        self.copy = self.tile = None

    def _start(self, pool: ThreadPoolExecutor, call: Callable[[StateFile, int, memoryview], None], tile: Tile) -> None:
        self.tile, begin = tile, tile.offset * _ELEMENT_BYTES
        for file, memory in zip(tile.files, self._memory, strict=True):
            # The last tile ends where DeepSpeed's padding does, which fits most drives' blocks.
            length = min(round_up(tile.length * _ELEMENT_BYTES, ALIGNMENT_BYTES), file.num_bytes - begin)
            view = buffer_of(memory)
            for at in range(0, length, REQUEST_BYTES):
                part = view[at : min(at + REQUEST_BYTES, length)]
                self._requests.append(run_on(pool, partial(call, file, begin + at, part)))
