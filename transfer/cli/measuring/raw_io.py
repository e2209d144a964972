"""Files read and written by threads as fast as the system allows: what others are measured against."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_requests(
    pool: ThreadPoolExecutor,
    threads: int,
    num_bytes: int,
    request_bytes: int,
    move: Callable[[int, int, int], None],
    most_seconds: float = float("inf"),
) -> int:
    """Lets threads take request after request, from the beginning on, until all are done or the time is over.

    Args:
        pool: Has so many threads.
        threads: How many of them take part.
        num_bytes: Of all requests; the last one may be short.
        request_bytes: Of each.
        move: Called with the number of the thread, the offset of a request and its length.
        most_seconds: No thread begins another request later.

    Returns:
        Bytes of the requests that were done.
    """
    offsets = itertools.count(0, request_bytes)
    started = time.perf_counter()

    def work(thread: int) -> int:
        moved = 0
        for offset in offsets:  # shared by the threads
            if offset >= num_bytes or (moved and time.perf_counter() - started > most_seconds):
                break
            length = min(request_bytes, num_bytes - offset)
            move(thread, offset, length)
            moved += length
        return moved

    return sum(pool.map(work, range(threads)))


def read_request(descriptor: int, memory: memoryview, offset: int) -> None:
    """Fills the memory from a file.

    Raises:
        OSError: It cannot be read, or ends too early.
    """
    _all_of(os.preadv, descriptor, memory, offset)


def write_request(descriptor: int, memory: memoryview, offset: int) -> None:
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
