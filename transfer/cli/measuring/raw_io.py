"""Files read and written by threads as fast as the system allows: the lower bound for everything that uses files."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...nvme.open_file import NOT_DIRECT


def in_requests(
    pool: ThreadPoolExecutor,
    threads: int,
    num_bytes: int,
    request_bytes: int,
    move: Callable[[int, int, int], None],
    most_seconds: float = float("inf"),
) -> int:
    """Lets threads take request after request, from the beginning on, until all are done or the time is over.

    ``move`` is called with the number of the thread, the offset of a request and its length. Returns the bytes of the
    requests that were done.
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


def move_all(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, memory: memoryview, offset: int
) -> None:
    """Fills all the memory from a file (``os.preadv``), or writes it to one (``os.pwritev``).

    Raises:
        OSError: The system refuses, or the file ends too early.
    """
    while memory:
        done = call(descriptor, [memory], offset)
        if done == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        memory, offset = memory[done:], offset + done


def goes_past_the_cache(attempt: Callable[[], object]) -> bool:
    """Whether an attempt with O_DIRECT works. Some file systems refuse it at ``open``, others at the first access."""
    try:
        attempt()
    except OSError as error:
        if error.errno in NOT_DIRECT:
            return False
        raise
    return True
