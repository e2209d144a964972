"""Memory that tiles of optimizer state pass through, on their way from files and back."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ...errors import SwapError
from ...in_flight import InFlightCopy
from ...interface import HostToDeviceTransfer
from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of, round_down, round_up, use_huge_pages
from ...nvme.threads import run_on
from .state_file import StateFile

_ELEMENT_BYTES = 4  # fp32
_STATES = 3  # master, first and second moments


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


class Requests:
    """Threads that read or write files, a part of a tile at a time.

    Args:
        threads: How many.
        request_bytes: Of one part, a multiple of 4096. Fewer bytes cost more in Python's lock than drives need.
    """

    def __init__(self, threads: int, request_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "h2d-state")
        self._request_bytes = max(ALIGNMENT_BYTES, round_down(request_bytes, ALIGNMENT_BYTES))

    def start(self, call: Callable[[int, memoryview], None], begin: int, view: memoryview) -> list[Future[None]]:
        """Starts ``call`` for each part of a range of a file, which begins at byte ``begin``."""
        parts = [(at, view[at : at + self._request_bytes]) for at in range(0, len(view), self._request_bytes)]
        return [run_on(self._pool, partial(call, begin + at, part)) for at, part in parts]

    def close(self) -> None:
        """Waits for what was started; then there are no threads any more."""
        self._pool.shutdown()


def bytes_for(elements: int) -> int:
    """The bytes of a slot."""
    return _STATES * round_up(elements * _ELEMENT_BYTES, ALIGNMENT_BYTES)


class SlotMemory:
    """The memory of several slots. The masters lie together, and are page-locked at once, as nothing else is.

    Blocks while it is taken. It is zero at first.

    Args:
        transfer: Page-locks what the device reads.
        elements: Of the largest tile of each slot.

    Attributes:
        num_bytes: Of all.

    Raises:
        Exception: What the transfer's ``prepare`` raises.
    """

    def __init__(self, transfer: HostToDeviceTransfer, elements: Sequence[int]) -> None:
        self._transfer = transfer
        self._sizes = [bytes_for(each) // _STATES for each in elements]
        self.num_bytes = _STATES * sum(self._sizes)
        self._states = [aligned_empty(sum(self._sizes)).zero_() for _ in range(_STATES)]
        for memory in self._states:
            use_huge_pages(memory)
        self.prepare()

    def prepare(self) -> None:
        """Page-locks the masters: before each step, as the transfer may have been closed meanwhile. Idempotent."""
        self._transfer.prepare(self._states[0])

    def parts(self) -> Iterator[list[Tensor]]:
        """Yields three tensors for each slot, of bytes."""
        begin = 0
        for size in self._sizes:
            yield [memory.narrow(0, begin, size) for memory in self._states]
            begin += size

    def close(self) -> None:
        """Undoes the page-lock."""
        self._transfer.unprepare(self._states[0])


class Slot:
    """Memory for one tile.

    It is free, or being read; then the optimizer updates it; then it is being written, and the device reads the master.

    Args:
        memory: See ``SlotMemory.parts``.

    Attributes:
        tensors: Master, first and second moments: flat, fp32.
        tile: What is in it, or on its way; None where it is free.
        copy: The copy to the device that reads it, if there is one.
        is_resident: Whether one tile stays in it from step to step.
    """

    is_resident = False

    def __init__(self, memory: list[Tensor]) -> None:
        self._memory = memory
        self.tensors = [each.view(torch.float32) for each in memory]
        self.tile: Tile | None = None
        self.copy: InFlightCopy | None = None
        self._requests: list[Future[None]] = []

    def read(self, requests: Requests, tile: Tile) -> None:
        """Starts to read a tile."""
        self._start(requests, StateFile.read, tile)

    def write(self, requests: Requests, tile: Tile) -> None:
        """Starts to write its tile."""
        self._start(requests, StateFile.write, tile)

    @property
    def is_idle(self) -> bool:
        """Whether it is neither read nor written now, and no device reads it."""
        return not self.requests_left and (self.copy is None or self.copy.done)

    @property
    def requests_left(self) -> list[Future[None]]:
        """Its requests that have not ended."""
        return [each for each in self._requests if not each.done()]

    def wait(self) -> None:
        """Blocks until it is neither read nor written.

        Raises:
            SwapError: The first error of a request, or caused by it where it is another kind; all have ended.
        """
        errors = [each.exception() for each in self._requests]
        self._requests = []
        for error in errors:
            if isinstance(error, SwapError):
                raise error
            if error is not None:  # no memory, or Ctrl-C where no thread could be started
                raise SwapError(
                    errno.EIO, f"optimizer state, {self.tile}, cannot be read or written: {error!r}"
                ) from error

    def free(self) -> None:
        """Blocks until no device reads it; then it has no tile."""
        if self.copy is not None:
            try:
                self.copy.release_source()
            except Exception:
                self.copy = None  # the device is idle then
                raise
        self.copy = self.tile = None

    def _start(self, requests: Requests, call: Callable[[StateFile, int, memoryview], None], tile: Tile) -> None:
        self.tile, begin = tile, tile.offset * _ELEMENT_BYTES
        for file, memory in zip(tile.files, self._memory, strict=True):
            # The last tile ends where DeepSpeed's padding does, which fits most drives' blocks.
            length = min(round_up(tile.length * _ELEMENT_BYTES, ALIGNMENT_BYTES), file.num_bytes - begin)
            self._requests += requests.start(partial(call, file), begin, buffer_of(memory)[:length])
