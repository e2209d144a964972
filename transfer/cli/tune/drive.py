"""What `h2d tune --nvme` measures: writing and reading a file, in blocks of several sizes, by several threads."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of
from ...nvme.checksums import checksums_of
from ...nvme.mounts import file_system
from ...nvme.open_file import NOT_DIRECT, O_DIRECT
from ...nvme.space import not_written, reserve
from ...nvme.swap_directory import OwnedFile, swap_directory
from ..measuring.ranks import Ranks
from ..measuring.raw_io import in_blocks, read_block, write_block

#: `nvme_swapped` reads one chunk of 16 MiB after the other: larger blocks would leave threads without work.
BLOCKS = (2**18, 2**20, 2**21, 2**22)
THREADS = (1, 4, 8, 12, 16)
#: A combination with more threads or larger blocks must gain this much.
_WORTH_MORE = 0.02


@dataclass(frozen=True)
class Bounds:
    """Of what is written and read.

    Attributes:
        file_bytes: Of each rank's file.
        fill_seconds: The file is made no larger than is written in so long.
        cell_seconds: No block is begun later in a measurement.
    """

    file_bytes: int = 2**29
    fill_seconds: float = 2.0
    cell_seconds: float = 0.15


def measure_drive(directory: str, ranks: Ranks, bounds: Bounds) -> dict[str, Any]:
    """The fields of a ``Drive``: of all ranks at once, each with a file of its own, which is deleted in any case.

    Raises:
        SwapError: The file cannot be written or read.
    """
    own = swap_directory(directory)
    path = own.new_path("h2d-tune")
    owned = OwnedFile(path, own)
    try:
        with _created(path) as (descriptor, direct), ThreadPoolExecutor(max(THREADS)) as pool:
            file = _File(descriptor, direct, pool)
            reserve(descriptor, path, bounds.file_bytes)
            # What is measured afterwards is written over, as swap files are, and nothing is read that is not there.
            filled, _ = file.run(True, BLOCKS[-1], 4, bounds.file_bytes, bounds.fill_seconds)
            cells = list(itertools.product((True, False), BLOCKS, THREADS))
            rates = []
            for writes, block_bytes, threads in cells:
                ranks.barrier()
                num_bytes, seconds = file.run(writes, block_bytes, threads, filled, bounds.cell_seconds)
                rates.append(num_bytes / max(seconds, 1e-9))
    except OSError as error:
        raise not_written(error, "the drive cannot be measured", path, bounds.file_bytes) from error
    finally:
        owned.delete()
    slowest = [min(of_ranks) for of_ranks in zip(*ranks.gather(rates), strict=True)]
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (writes, block_bytes, threads), rate in zip(cells, slowest, strict=True):
        found[writes].append({"block_bytes": block_bytes, "threads": threads, "bytes_per_second": rate})
    return {
        "file_system": file_system(own.path) or "unknown",
        "direct": all(ranks.gather(direct)),
        "read": found[False],
        "write": found[True],
        "best_read": best(found[False]),
        "best_write": best(found[True]),
    }


def best(rates: list[dict[str, Any]]) -> dict[str, Any]:
    """The fewest threads, and then the smallest blocks, that are within 2% of the highest rate."""
    highest = max(one["bytes_per_second"] for one in rates)
    enough = [one for one in rates if one["bytes_per_second"] >= highest * (1 - _WORTH_MORE)]
    return min(enough, key=lambda one: (one["threads"], one["block_bytes"]))


class _File:
    """A file that is written and read over and over."""

    def __init__(self, descriptor: int, direct: bool, pool: ThreadPoolExecutor) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._pool = pool
        # Random, as some drives compress; one for each thread.
        noise = os.urandom(BLOCKS[-1])
        self._memory = [aligned_empty(BLOCKS[-1]) for _ in range(max(THREADS))]
        for memory in self._memory:
            buffer_of(memory)[:] = noise

    def run(
        self, writes: bool, block_bytes: int, threads: int, most_bytes: int, most_seconds: float
    ) -> tuple[int, float]:
        """Block after block from the beginning, until all are done or the time is over.

        Returns:
            Bytes, and the seconds that they took.
        """
        if not self._direct and not writes and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        block = write_block if writes else read_block

        def move(thread: int, offset: int, length: int) -> None:
            memory = buffer_of(self._memory[thread])[:length]
            block(self._descriptor, memory, offset)
            # As `swap_out` and `nvme_swapped` do; without it, fewer threads would seem to be enough.
            checksums_of(memory, length)

        most_bytes -= most_bytes % min(block_bytes, most_bytes)  # whole blocks
        started = time.perf_counter()
        moved = in_blocks(self._pool, threads, most_bytes, block_bytes, move, most_seconds)
        if writes and not self._direct:  # else it would be the page cache that is written to
            os.fsync(self._descriptor)
        return moved, time.perf_counter() - started


@contextlib.contextmanager
def _created(path: Path) -> Iterator[tuple[int, bool]]:
    """The descriptor of a new file, and whether it goes past the page cache."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    direct = _open_direct(path)
    try:
        yield (descriptor if direct is None else direct), direct is not None
    finally:
        os.close(descriptor)
        if direct is not None:
            os.close(direct)


def _open_direct(path: Path) -> int | None:
    if not O_DIRECT:
        return None
    try:
        direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | O_DIRECT)
    except OSError:
        return None
    try:  # some file systems refuse it only now
        os.pwrite(direct, buffer_of(aligned_empty(ALIGNMENT_BYTES)), 0)
    except OSError as error:
        os.close(direct)
        if error.errno in NOT_DIRECT:
            return None
        raise
    return direct
