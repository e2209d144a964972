"""What `h2d tune --nvme` measures: writing and reading a file, in requests of several sizes, by several threads."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of, round_down
from ...nvme.checksums import checksums_of
from ...nvme.mounts import file_system
from ...nvme.new_file import created, not_written
from ...nvme.swap_directory import OwnedFile, swap_directory
from ..measuring.ranks import Ranks
from ..measuring.raw_io import goes_past_the_cache, in_requests, move_all

#: `nvme_swapped` reads one chunk of 16 MiB after the other: larger requests would leave threads without work.
REQUESTS = (2**18, 2**20, 2**21, 2**22)
THREADS = (1, 4, 8, 12, 16)
#: While as many threads read as write. Smaller requests than these never were faster, where many are under way.
MIXED_REQUESTS = (2**20, 2**21, 2**22)
MIXED_THREADS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Bounds:
    """Of what is written and read."""

    file_bytes: int = 2**29  #: Of each rank's file.
    fill_seconds: float = 2.0  #: The file is made no larger than is written in so long.
    cell_seconds: float = 0.15  #: No request is begun later in a measurement.


def measure_drive(directory: str, ranks: Ranks, bounds: Bounds) -> dict[str, Any]:
    """The fields of a ``Drive``: of all ranks at once, each with a file of its own, which is deleted in any case.

    Raises:
        SwapError: The file cannot be written or read.
    """
    own = swap_directory(directory)
    path = own.new_path("h2d-tune")
    owned = OwnedFile(path, own)
    cells = list(itertools.product(REQUESTS, THREADS))
    mixed_cells = list(itertools.product(MIXED_REQUESTS, MIXED_THREADS))
    rates = []
    try:
        with created(path, bounds.file_bytes) as (cached, past), ThreadPoolExecutor(max(THREADS)) as pool:
            file = _File(cached, past, pool)
            # Filled first: writes are measured over old values, as in swap files, and reads of what is there.
            filled, _ = file.run(True, REQUESTS[-1], 4, bounds.file_bytes, bounds.fill_seconds)
            for writes, (request_bytes, threads) in itertools.product((True, False), cells):
                ranks.barrier()
                num_bytes, seconds = file.run(writes, request_bytes, threads, filled, bounds.cell_seconds)
                rates.append(_rate(num_bytes, seconds))
            for request_bytes, threads in mixed_cells:
                ranks.barrier()
                both_at_once = file.run_both(request_bytes, threads, filled // 2, bounds.cell_seconds)
                rates += [_rate(num_bytes, seconds) for num_bytes, seconds in both_at_once]
    except OSError as error:
        raise not_written(error, "the drive cannot be measured", path, bounds.file_bytes) from error
    finally:
        owned.delete()
    slowest = [min(of_ranks) for of_ranks in zip(*ranks.gather(rates), strict=True)]
    names = ("request_bytes", "threads", "written_bytes_per_second", "read_bytes_per_second")
    written, read, mixed = (slowest[: len(cells)], slowest[len(cells) : 2 * len(cells)], slowest[2 * len(cells) :])
    one_by_one = zip(cells, written, read, strict=True)
    at_once = zip(mixed_cells, mixed[::2], mixed[1::2], strict=True)
    return {
        "file_system": file_system(own.path) or "unknown",
        "direct": all(ranks.gather(file.is_direct)),
        "rates": [dict(zip(names, (*cell, *rates), strict=True)) for cell, *rates in one_by_one],
        "mixed": [dict(zip(names, (*cell, *rates), strict=True)) for cell, *rates in at_once],
    }


def _rate(num_bytes: int, seconds: float) -> float:
    """Bytes in a second, with four digits; above 0, which too short a time may say."""
    return float(f"{max(num_bytes, 1) / max(seconds, 1e-9):.4g}")


class _File:
    """A new file that is written and read over and over, past the page cache where the file system allows that."""

    def __init__(self, cached: int, past: int | None, pool: ThreadPoolExecutor) -> None:
        # Random, as some drives compress; one for each thread.
        noise = os.urandom(REQUESTS[-1])
        most = max(*THREADS, 2 * max(MIXED_THREADS))
        self._memory = [aligned_empty(REQUESTS[-1]) for _ in range(most)]
        for memory in self._memory:
            buffer_of(memory)[:] = noise
        first = buffer_of(self._memory[0])[:ALIGNMENT_BYTES]
        self.is_direct = past is not None and goes_past_the_cache(lambda: move_all(os.pwritev, past, first, 0))
        self._descriptor = past if self.is_direct and past is not None else cached
        self._pool = pool

    def run(
        self, writes: bool, request_bytes: int, threads: int, most_bytes: int, most_seconds: float
    ) -> tuple[int, float]:
        """Request after request from the beginning, until all are done or the time is over.

        Returns:
            Bytes, and the seconds that they took.
        """
        if not self.is_direct and not writes and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

        def move(thread: int, offset: int, length: int) -> None:
            memory = buffer_of(self._memory[thread])[:length]
            move_all(os.pwritev if writes else os.preadv, self._descriptor, memory, offset)
            # As `swap_out` and `nvme_swapped` do; without it, fewer threads would seem to be enough.
            checksums_of(memory, length)

        most_bytes -= most_bytes % min(request_bytes, most_bytes)  # whole requests
        started = time.perf_counter()
        moved = in_requests(self._pool, threads, most_bytes, request_bytes, move, most_seconds)
        if writes and not self.is_direct:  # else the page cache would be what is written to
            os.fsync(self._descriptor)
        return moved, time.perf_counter() - started

    def run_both(
        self, request_bytes: int, threads: int, most_bytes: int, most_seconds: float
    ) -> list[tuple[int, float]]:
        """Writes the second half of the file while other threads read the first, each with ``threads``.

        Returns:
            Bytes, and the seconds that they took: of writing, and of reading.
        """
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        whole = round_down(most_bytes, min(request_bytes, ALIGNMENT_BYTES))

        def half(writes: bool) -> tuple[int, float]:
            call, begin, first = (os.pwritev, whole, 0) if writes else (os.preadv, 0, threads)

            def move(thread: int, offset: int, length: int) -> None:
                move_all(call, self._descriptor, buffer_of(self._memory[first + thread])[:length], begin + offset)

            with ThreadPoolExecutor(threads) as pool:
                started = time.perf_counter()
                moved = in_requests(pool, threads, whole, request_bytes, move, most_seconds)
                if writes and not self.is_direct:
                    os.fsync(self._descriptor)
                return moved, time.perf_counter() - started

        with ThreadPoolExecutor(2) as halves:
            return list(halves.map(half, (True, False)))
