"""Chunks of a file on their way into memory, several at once, checked before anybody uses them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from ..errors import SwapError
from .aligned_memory import ALIGNMENT_BYTES, round_down, round_up
from .checksums import Checksums
from .file_format import corrupted
from .open_swapped import OpenFile, open_swapped
from .threads import start_on

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


def plan_reads(swapped: SwappedTensor, capacity: int, checked: bool, direct: bool) -> tuple[list[Chunk], bool]:
    """Cuts a file into chunks.

    Args:
        swapped: The values.
        capacity: Bytes of the memory that a chunk is read into; a multiple of the alignment.
        checked: Whether checksums are to be compared, and so whole blocks to be read.
        direct: Whether that memory is aligned, so that reads may go past the page cache.

    Returns:
        The chunks, and whether they can be read past the page cache.

    Raises:
        SwapError: The file has checksums over more bytes than fit.
    """
    size, start = swapped.element_size(), swapped.offset_bytes
    most = capacity
    skip = start % ALIGNMENT_BYTES
    direct = direct and start % size == 0
    if checked and swapped.checksums is not None:
        unit = min(swapped.checksums.checksum_bytes, round_up(swapped.nbytes, ALIGNMENT_BYTES))
        direct = direct and unit % ALIGNMENT_BYTES == 0 and skip == 0
    else:
        unit = ALIGNMENT_BYTES
        if direct and skip:
            most -= ALIGNMENT_BYTES  # read in vain before the first value, or after the last
        if not direct or most < unit:
            unit, direct, most = size, False, capacity
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
    """Reads pieces of chunks on threads. Made by ``reading``, which also starts and ends it.

    Each thread takes the next piece from one queue until the file is read. On fast drives, what bounds them is how
    often they hand the interpreter's lock to each other: so there is one checksum for a piece, no lock of its
    own, and no operation of torch, each of which gives the interpreter's lock away too.

    Args:
        file: What.
        request_bytes: The most that a thread asks the drive for at a time. A piece is that, or what one checksum
            covers where that is more.
        checksums: Compared where given.
    """

    def __init__(self, file: OpenFile, request_bytes: int, checksums: Checksums | None) -> None:
        self._file = file
        unit = ALIGNMENT_BYTES if checksums is None else checksums.checksum_bytes
        self._piece_bytes = max(unit, round_down(request_bytes, unit))
        self._request_bytes = max(ALIGNMENT_BYTES, round_down(request_bytes, ALIGNMENT_BYTES))
        self._checksums = checksums
        self._tasks: SimpleQueue[_Piece | None] = SimpleQueue()
        self._stopped = False
        self._working: list[Future[None]] = []

    def employ(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Lets so many threads of the pool read. Whatever ends it, ``drain`` is to follow."""
        for _ in range(threads):
            working = start_on(pool, self._work)
            if working is None:
                break  # those that there are read everything, or this one does
            self._working.append(working)

    def start(self, chunk: Chunk, memory: memoryview) -> Callable[[], None]:
        """Begins to read a chunk.

        Args:
            chunk: Which.
            memory: At least ``chunk.length`` bytes, which belong to the read until it is waited for.

        Returns:
            Blocks until the chunk is there, and raises what reading it raised.
        """
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        pieces = [
            _Piece(chunk, begin, memory[begin : min(begin + self._piece_bytes, chunk.length)], done)
            for begin in range(0, chunk.length, self._piece_bytes)
        ]
        for piece in pieces:
            if self._working:
                self._tasks.put(piece)
            else:
                self._read(piece)
                done.put(None)

        def wait() -> None:
            for _ in pieces:
                error = done.get()
                if error is not None:
                    raise error

        return wait

    def _work(self) -> None:
        while (piece := self._tasks.get()) is not None:
            error: BaseException | None = None
            try:
                if not self._stopped:
                    self._read(piece)
            except BaseException as caught:  # noqa: BLE001 - whatever it is, the copy has to end with it
                error = caught
            piece.done.put(error)
        self._tasks.put(None)  # for the next one; also one that nobody knows of, as employing it was interrupted

    def _read(self, piece: _Piece) -> None:
        chunk, begin = piece.chunk, piece.begin
        needed = min(begin + len(piece.memory), chunk.skip + chunk.num_bytes) - begin
        for at in range(0, needed, self._request_bytes):
            memory = piece.memory[at : at + self._request_bytes]
            self._file.read(chunk.offset + begin + at, memory, min(len(memory), needed - at))
        if self._checksums is None:
            return
        wrong = self._checksums.first_mismatch(chunk.first_byte + begin, piece.memory[:needed])
        if wrong is not None:
            what = f"the {self._checksums.checksum_bytes} bytes of values from byte {wrong} on"
            raise corrupted(self._file.path, f"{what} are not those that were written (their checksum is another)")

    def drain(self) -> None:
        """Blocks until nothing is being read; what has not begun is not read at all."""
        self._stopped = True
        try:
            self._tasks.put(None)
            while self._working:
                self._working[-1].exception()
                self._working.pop()
        finally:
            if self._working:  # Ctrl-C while this waited, and the memory is still being written
                self.drain()


class _Piece(NamedTuple):
    """What one thread reads at a time: of a chunk, from a byte on, into its part of the memory."""

    chunk: Chunk
    begin: int
    memory: memoryview
    done: SimpleQueue[BaseException | None]


@contextmanager
def reading(
    swapped: SwappedTensor,
    pool: ThreadPoolExecutor,
    *,
    capacity: int,
    threads: int,
    request_bytes: int,
    checked: bool,
    direct: bool = True,
) -> Iterator[tuple[ReadAhead, list[Chunk]]]:
    """Opens and checks a file, and plans its chunks. At the end of the block nothing is being read any more.

    Raises:
        SwapError: The file cannot be opened, or is not what the handle says.
    """
    chunks, direct = plan_reads(swapped, capacity, checked, direct)
    checksums = swapped.checksums if checked else None
    with open_swapped(swapped, direct) as file:
        ahead = ReadAhead(file, request_bytes, checksums)
        try:
            ahead.employ(pool, threads)
            yield ahead, chunks
        finally:
            ahead.drain()
