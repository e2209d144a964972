"""What `h2d tune --nvme` measures: writing and reading a file, in requests of several sizes, by several threads."""

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
from ..measuring.raw_io import in_requests, read_request, write_request

#: `nvme_swapped` reads one chunk of 16 MiB after the other: larger requests would leave threads without work.
REQUESTS = (2**18, 2**20, 2**21, 2**22)
THREADS = (1, 4, 8, 12, 16)


@dataclass(frozen=True)
class Bounds:
    """Of what is written and read.

    Attributes:
        file_bytes: Of each rank's file.
        fill_seconds: The file is made no larger than is written in so long.
        cell_seconds: No request is begun later in a measurement.
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
    cells = list(itertools.product(REQUESTS, THREADS))
    rates = []
    try:
        with created(path, bounds.file_bytes) as (cached, past), ThreadPoolExecutor(max(THREADS)) as pool:
            direct = _writes_directly(past)
            file = _File(past if direct and past is not None else cached, direct, pool)
            # Filled first: writes are measured over old values, as in swap files, and reads of what is there.
            filled, _ = file.run(True, REQUESTS[-1], 4, bounds.file_bytes, bounds.fill_seconds)
            for writes, (request_bytes, threads) in itertools.product((True, False), cells):
                ranks.barrier()
                num_bytes, seconds = file.run(writes, request_bytes, threads, filled, bounds.cell_seconds)
                rates.append(float(f"{num_bytes / max(seconds, 1e-9):.4g}"))
    except OSError as error:
        raise not_written(error, "the drive cannot be measured", path, bounds.file_bytes) from error
    finally:
        owned.delete()
    slowest = [min(of_ranks) for of_ranks in zip(*ranks.gather(rates), strict=True)]
    written, read = slowest[: len(cells)], slowest[len(cells) :]
    names = ("request_bytes", "threads", "read_bytes_per_second", "written_bytes_per_second")
    return {
        "file_system": file_system(own.path) or "unknown",
        "direct": all(ranks.gather(direct)),
        "rates": [
            dict(zip(names, (*cell, *both), strict=True)) for cell, *both in zip(cells, read, written, strict=True)
        ],
    }


class _File:
    """A file that is written and read over and over."""

    def __init__(self, descriptor: int, direct: bool, pool: ThreadPoolExecutor) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._pool = pool
        # Random, as some drives compress; one for each thread.
        noise = os.urandom(REQUESTS[-1])
        self._memory = [aligned_empty(REQUESTS[-1]) for _ in range(max(THREADS))]
        for memory in self._memory:
            buffer_of(memory)[:] = noise

    def run(
        self, writes: bool, request_bytes: int, threads: int, most_bytes: int, most_seconds: float
    ) -> tuple[int, float]:
        """Request after request from the beginning, until all are done or the time is over.

        Returns:
            Bytes, and the seconds that they took.
        """
        if not self._direct and not writes and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        request = write_request if writes else read_request

        def move(thread: int, offset: int, length: int) -> None:
            memory = buffer_of(self._memory[thread])[:length]
            request(self._descriptor, memory, offset)
            # As `swap_out` and `nvme_swapped` do; without it, fewer threads would seem to be enough.
            checksums_of(memory, length)

        most_bytes -= most_bytes % min(request_bytes, most_bytes)  # whole requests
        started = time.perf_counter()
        moved = in_requests(self._pool, threads, most_bytes, request_bytes, move, most_seconds)
        if writes and not self._direct:  # else the page cache would be what is written to
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
