"""What `h2d tune --nvme` measures: writing and reading a file, in blocks of several sizes, by several threads."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of
from ...nvme.checksums import checksums_of
from ...nvme.mounts import file_system
from ...nvme.new_file import created, not_written
from ...nvme.open_file import NOT_DIRECT
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
        with created(path, bounds.file_bytes) as (cached, past), ThreadPoolExecutor(max(THREADS)) as pool:
            direct = _writes_directly(past)
            file = _File(past if direct and past is not None else cached, direct, pool)
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


def _writes_directly(direct: int | None) -> bool:
    """Whether a new file can be written past the page cache: some file systems refuse it only now."""
    if direct is None:
        return False
    try:
        os.pwrite(direct, buffer_of(aligned_empty(ALIGNMENT_BYTES)), 0)
    except OSError as error:
        if error.errno in NOT_DIRECT:
            return False
        raise
    return True
