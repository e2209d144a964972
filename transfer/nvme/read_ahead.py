"""Chunks of a file on their way into memory, several at once, checked before anybody uses them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import SwapError
from .checksums import Checksums
from .memory import ALIGNMENT_BYTES, buffer_of, round_down, round_up
from .open_file import OpenFile, open_swapped
from .readers import Reader
from .swap_file import corrupted
from .threads import run_on

if TYPE_CHECKING:
    from .swapped_tensor import SwappedTensor


@dataclass(frozen=True)
class Chunk:
    """Values that are read at once.

    Attributes:
        first: Index of the first value.
        numel: How many.
        offset: Where reading begins in the file.
        length: Bytes to read.
        skip: Of these, before the first value.
        first_byte: Where the first value lies, counted from the first of all.
        num_bytes: Bytes of the values.
    """

    first: int
    numel: int
    offset: int
    length: int
    skip: int
    first_byte: int
    num_bytes: int


def plan_reads(swapped: SwappedTensor, capacity: int, max_elements: int, checked: bool) -> tuple[list[Chunk], bool]:
    """Cuts a file into chunks.

    Args:
        swapped: The values.
        capacity: Bytes of the memory that a chunk is read into; a multiple of the alignment.
        max_elements: The most values in a chunk.
        checked: Whether checksums are to be compared, and so whole blocks to be read.

    Returns:
        The chunks, and whether they can be read past the page cache.

    Raises:
        SwapError: The file has checksums over more bytes than fit.
    """
    size, start = swapped.element_size(), swapped.offset_bytes
    most = min(capacity, max_elements * size)
    skip = start % ALIGNMENT_BYTES
    direct = start % size == 0
    if checked and swapped.checksums is not None:
        unit = swapped.checksums.block_bytes
        direct = direct and unit % ALIGNMENT_BYTES == 0 and skip == 0
    else:
        unit = ALIGNMENT_BYTES
        if direct:
            most = min(most, capacity - (ALIGNMENT_BYTES if skip else 0))
        if most < unit:
            unit, direct, most = size, False, min(capacity, max_elements * size)
    payload = round_down(most, unit)
    if payload == 0:
        enough = -(-unit * capacity // (4 * most))
        raise SwapError(
            errno.EINVAL,
            f"this file has a checksum for each {unit} bytes, and chunks hold {most}: raise "
            f"`nvme_swapped.chunk_elements` to {enough}, or set `nvme_swapped.checksums: false`",
            str(swapped.path),
        )
    chunks = []
    for begin in range(0, swapped.nbytes, payload):
        end = min(begin + payload, swapped.nbytes)
        offset = round_down(start + begin, ALIGNMENT_BYTES) if direct else start + begin
        length = (round_up(start + end, ALIGNMENT_BYTES) if direct else start + end) - offset
        values = (start + begin - offset, begin, end - begin)
        chunks.append(Chunk(begin // size, (end - begin) // size, offset, length, *values))
    return chunks, direct


class ReadAhead:
    """Reads pieces of chunks on threads. Made by ``reading``, which also ends it.

    Args:
        pool: The threads.
        reader: How they read.
        file: What.
        piece_bytes: The most that a thread reads at a time.
        checksums: Compared where given.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, reader: Reader, file: OpenFile, piece_bytes: int, checksums: Checksums | None
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._file = file
        unit = ALIGNMENT_BYTES if checksums is None else checksums.block_bytes
        self._piece_bytes = max(unit, round_down(piece_bytes, unit))
        self._checksums = checksums
        self._pending: list[Future[None]] = []

    def start(self, chunk: Chunk, memory: Tensor) -> Callable[[], None]:
        """Begins to read a chunk.

        Args:
            chunk: Which.
            memory: At least ``chunk.length`` bytes, which belong to the read until it is waited for.

        Returns:
            Blocks until the chunk is there, and raises what reading it raised.
        """
        mine = [
            self._submit(chunk, begin, memory.narrow(0, begin, min(self._piece_bytes, chunk.length - begin)))
            for begin in range(0, chunk.length, self._piece_bytes)
        ]

        def wait() -> None:
            for future in mine:
                future.result()
            self._pending = [future for future in self._pending if not future.done()]

        return wait

    def _submit(self, chunk: Chunk, begin: int, memory: Tensor) -> Future[None]:
        future = run_on(self._pool, partial(self._read, chunk, begin, memory))
        self._pending.append(future)
        return future

    def _read(self, chunk: Chunk, begin: int, memory: Tensor) -> None:
        values_end = chunk.skip + chunk.num_bytes
        needed = min(begin + memory.numel(), values_end) - begin
        self._reader.read(self._file, chunk.offset + begin, memory, needed)
        if self._checksums is None:
            return
        wrong = self._checksums.first_mismatch(chunk.first_byte + begin, buffer_of(memory)[:needed])
        if wrong is not None:
            block = self._checksums.block_bytes
            what = f"the {block} bytes of values from byte {wrong} on are not those that were written"
            raise corrupted(self._file.path, f"{what} (their checksum is another)")

    def drain(self) -> None:
        """Blocks until nothing is being read; what has not begun is not read at all."""
        try:
            for future in self._pending:
                future.cancel()
            while self._pending:
                if not self._pending[-1].cancelled():
                    self._pending[-1].exception()
                self._pending.pop()
        finally:
            if self._pending:  # Ctrl-C while this waited, and the memory is still being written
                self.drain()


@contextmanager
def reading(
    swapped: SwappedTensor,
    pool: ThreadPoolExecutor,
    reader: Reader,
    *,
    capacity: int,
    max_elements: int,
    piece_bytes: int,
    checked: bool,
) -> Iterator[tuple[ReadAhead, list[Chunk]]]:
    """Opens and checks a file, and plans its chunks. At the end of the block nothing is being read any more.

    Raises:
        SwapError: The file cannot be opened, or is not what the handle says.
    """
    chunks, direct = plan_reads(swapped, capacity, max_elements, checked)
    checksums = swapped.checksums if checked else None
    with open_swapped(swapped, direct) as file:
        ahead = ReadAhead(pool, reader, file, piece_bytes, checksums)
        try:
            yield ahead, chunks
        finally:
            ahead.drain()
