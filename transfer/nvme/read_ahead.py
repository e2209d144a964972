"""Chunks of a file on their way into memory, several at once, checked before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of, round_down, round_up
from .checksums import Checksums
from .file_format import corrupted
from .open_swapped import OpenFile, open_swapped
from .threads import start_on

if TYPE_CHECKING:
    from .swapped_tensor import SwappedTensor


@dataclass(frozen=True)
class Chunk:
    """Values that are read into one buffer.

    Attributes:
        first: Index of the first value.
        offset: Where reading begins in the file.
        length: Bytes to read.
        skip: How many of these bytes precede the first value.
        first_byte: Byte offset of the first value from the first value of the file.
        num_bytes: Bytes of the values.
    """

    first: int
    offset: int
    length: int
    skip: int
    first_byte: int
    num_bytes: int


def plan_reads(
    swapped: SwappedTensor, capacity: int, checksums: Checksums | None, direct: bool
) -> tuple[list[Chunk], bool]:
    """Cuts a file into chunks.

    Args:
        swapped: The values.
        capacity: Bytes of the memory that a chunk is read into; a multiple of the alignment.
        checksums: To be compared, so that each lies within one chunk; none covers more than a chunk holds.
        direct: Whether that memory is aligned, so that reads may go past the page cache.

    Returns:
        The chunks, and whether they can be read past the page cache.
    """
    size, start = swapped.element_size(), swapped.offset_bytes
    most = capacity
    skip = start % ALIGNMENT_BYTES
    direct = direct and start % size == 0
    if checksums is not None:
        unit = _covered(swapped, checksums)
        direct = direct and unit % ALIGNMENT_BYTES == 0 and skip == 0
    else:
        unit = ALIGNMENT_BYTES
        if direct and skip:
            most -= ALIGNMENT_BYTES  # the most that is read before the first value and after the last
        if not direct or most < unit:
            unit, direct, most = size, False, capacity
    payload = round_down(most, unit)
    chunks = []
    for begin in range(0, swapped.nbytes, payload):
        end = min(begin + payload, swapped.nbytes)
        offset = round_down(start + begin, ALIGNMENT_BYTES) if direct else start + begin
        length = (round_up(start + end, ALIGNMENT_BYTES) if direct else start + end) - offset
        chunks.append(Chunk(begin // size, offset, length, start + begin - offset, begin, end - begin))
    return chunks, direct


def _covered(swapped: SwappedTensor, checksums: Checksums) -> int:
    """Bytes under one checksum, of a file that may be shorter."""
    return min(checksums.checksum_bytes, round_up(swapped.nbytes, ALIGNMENT_BYTES))


class Reads(Protocol):
    """Reads the chunks of one file. Made and ended by ``reading``."""

    def start(self, chunk: Chunk, memory: memoryview) -> Callable[[], None]:
        """Begins to read the next chunk of the plan into memory that belongs to the read until it is waited for.

        Returns:
            A function that blocks until the chunk is read, and raises what reading it raised.
        """


class ReadAhead(Reads):
    """Reads on threads, several chunks at once.

    Each thread takes the next task from one queue until the file is read. On fast drives, handing the interpreter's
    lock to each other bounds them. So a task has one checksum, no lock of its own, and no operation of torch, each of
    which releases the interpreter's lock.

    Args:
        file: The file.
        request_bytes: The most that a thread asks the drive for at a time. A task is one request, or as many as one
            checksum covers.
        checksums: Compared where given.
    """

    def __init__(self, file: OpenFile, request_bytes: int, checksums: Checksums | None) -> None:
        self._file = file
        unit = ALIGNMENT_BYTES if checksums is None else checksums.checksum_bytes
        self._task_bytes = max(unit, round_down(request_bytes, unit))
        self._request_bytes = request_bytes
        self._checksums = checksums
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._stopped = False
        self._workers: list[Future[None]] = []

    def start_workers(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Lets ``threads`` threads of the pool read. ``drain`` must follow, also after an exception."""
        for _ in range(threads):
            worker = start_on(pool, self._work)
            if worker is None:
                break  # the workers so far read everything, or this thread does
            self._workers.append(worker)

    def start(self, chunk: Chunk, memory: memoryview) -> Callable[[], None]:
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        tasks = [
            _Task(chunk, begin, memory[begin : min(begin + self._task_bytes, chunk.length)], done)
            for begin in range(0, chunk.length, self._task_bytes)
        ]
        for task in tasks:
            if self._workers:
                self._tasks.put(task)
            else:
                self._read(task)
                done.put(None)

        def wait() -> None:
            for _ in tasks:
                error = done.get()
                if error is not None:
                    raise error

        return wait

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            error: BaseException | None = None
            try:
                if not self._stopped:
                    self._read(task)
            except BaseException as caught:  # noqa: BLE001 - whatever it is, the copy has to end with it
                error = caught
            task.done.put(error)
        # Wakes the next worker, including one that an interrupt kept out of `_workers`.
        self._tasks.put(None)

    def _read(self, task: _Task) -> None:
        chunk, begin = task.chunk, task.begin
        needed = min(begin + len(task.memory), chunk.skip + chunk.num_bytes) - begin
        _read_requests(self._file, chunk.offset + begin, task.memory, needed, self._request_bytes)
        if self._checksums is not None:
            _check(self._file, self._checksums, chunk.first_byte + begin, task.memory[:needed])

    def drain(self) -> None:
        """Blocks until nothing is being read. Tasks that have not begun are dropped."""
        self._stopped = True
        try:
            self._tasks.put(None)
            while self._workers:
                self._workers[-1].exception()
                self._workers.pop()
        finally:
            if self._workers:  # Ctrl-C while this waited, and the memory is still being written
                self.drain()


class _Task(NamedTuple):
    """What one thread reads and checks at a time: the bytes of a chunk from ``begin`` on, into ``memory``."""

    chunk: Chunk
    begin: int
    memory: memoryview
    done: SimpleQueue[BaseException | None]


class ReadWhole(Reads):
    """Reads in the calling thread, where one checksum covers more than a chunk holds.

    The values under one checksum are read into memory of this object and checked; chunks are copied from there.
    """

    def __init__(self, file: OpenFile, request_bytes: int, checksums: Checksums, swapped: SwappedTensor) -> None:
        self._file = file
        self._request_bytes = request_bytes
        self._checksums = checksums
        self._values_offset, self._values_bytes = swapped.offset_bytes, swapped.nbytes
        self._unit = _covered(swapped, checksums)
        self._memory = buffer_of(aligned_empty(self._unit))
        self._held = -1

    def start(self, chunk: Chunk, memory: memoryview) -> Callable[[], None]:
        done = 0
        while done < chunk.num_bytes:
            number, begin = divmod(chunk.first_byte + done, self._unit)
            self._hold(number)
            length = min(chunk.num_bytes - done, self._unit - begin)
            memory[done : done + length] = self._memory[begin : begin + length]
            done += length
        return lambda: None

    def _hold(self, number: int) -> None:
        if number == self._held:
            return
        self._held = -1
        first = number * self._unit
        needed = min(self._unit, self._values_bytes - first)
        _read_requests(self._file, self._values_offset + first, self._memory, needed, self._request_bytes)
        _check(self._file, self._checksums, first, self._memory[:needed])
        self._held = number


def _read_requests(file: OpenFile, offset: int, memory: memoryview, needed: int, request_bytes: int) -> None:
    for at in range(0, needed, request_bytes):
        part = memory[at : at + request_bytes]
        file.read(offset + at, part, min(len(part), needed - at))


def _check(file: OpenFile, checksums: Checksums, first_byte: int, values: memoryview) -> None:
    wrong = checksums.first_mismatch(first_byte, values)
    if wrong is not None:
        what = f"the {checksums.checksum_bytes} bytes of values from byte {wrong} on"
        raise corrupted(file.path, f"{what} are not those that were written (their checksum is another)")


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
) -> Iterator[tuple[Reads, list[Chunk]]]:
    """Opens and checks a file, and plans its chunks. The end of the block waits until nothing is being read.

    Args:
        swapped: The values; at least one.
        pool: Its threads read, unless a checksum covers more than ``capacity``: then the calling thread does.
        capacity: Bytes of the memory for each chunk; a multiple of the alignment.
        threads: How many of the pool's.
        request_bytes: The most that is asked of the drive at a time; rounded down to the alignment.
        checked: Whether checksums are compared, where the file has some.
        direct: Whether the memory for chunks is aligned, so that reads may go past the page cache.

    Raises:
        SwapError: The file cannot be opened, or is not what the handle says.
    """
    checksums = swapped.checksums if checked else None
    request_bytes = max(ALIGNMENT_BYTES, round_down(request_bytes, ALIGNMENT_BYTES))
    if checksums is not None and _covered(swapped, checksums) > capacity:
        chunks, _ = plan_reads(swapped, capacity, None, direct=False)
        with open_swapped(swapped) as file:
            yield ReadWhole(file, request_bytes, checksums, swapped), chunks
        return
    chunks, direct = plan_reads(swapped, capacity, checksums, direct)
    with open_swapped(swapped, direct) as file:
        ahead = ReadAhead(file, request_bytes, checksums)
        try:
            requests = len(chunks) * -(-chunks[0].length // request_bytes)  # the first chunk is the longest
            ahead.start_workers(pool, min(threads, requests))
            yield ahead, chunks
        finally:
            ahead.drain()
