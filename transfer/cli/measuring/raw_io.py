"""Files read and written by threads as fast as the system allows: what others are measured against."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_blocks(
    pool: ThreadPoolExecutor,
    threads: int,
    num_bytes: int,
    block_bytes: int,
    move: Callable[[int, int, int], None],
    most_seconds: float = float("inf"),
) -> int:
    """Lets threads take block after block, from the beginning on, until all are done or the time is over.

    Args:
        pool: Has so many threads.
        threads: How many of them take part.
        num_bytes: Of all blocks; the last one may be short.
        block_bytes: Of each.
        move: Called with the number of the thread, the offset of a block and its length.
        most_seconds: No thread begins another block later.

    Returns:
        Bytes of the blocks that were moved.
    """
    offsets = itertools.count(0, block_bytes)
    started = time.perf_counter()

    def work(thread: int) -> int:
        moved = 0
        for offset in offsets:  # shared by the threads
            if offset >= num_bytes or (moved and time.perf_counter() - started > most_seconds):
                break
            length = min(block_bytes, num_bytes - offset)
            move(thread, offset, length)
            moved += length
        return moved

    return sum(pool.map(work, range(threads)))


def read_block(descriptor: int, memory: memoryview, offset: int) -> None:
    """Fills the memory from a file.

    Raises:
        OSError: It cannot be read, or ends too early.
    """
    _all_of(os.preadv, descriptor, memory, offset)


def write_block(descriptor: int, memory: memoryview, offset: int) -> None:
    """Writes the memory to a file.

    Raises:
        OSError: It cannot be written.
    """
    _all_of(os.pwritev, descriptor, memory, offset)


def _all_of(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, memory: memoryview, offset: int
) -> None:
    while memory:
        done = call(descriptor, [memory], offset)
        if done == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        memory, offset = memory[done:], offset + done
