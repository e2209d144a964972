"""``h2d bench zero3 --nvme``: who is compared, each in processes of its own with files of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accelerators.deepspeed_aio import make_handle, may_lock_bytes, settings

from .rows import ALL, HALF, IN_MEMORY, NVME_PEERS, PIPELINED, TUNED

_THREADS, _BLOCK_BYTES = (1, 2, 4, 8, 16), (2**20, 2**23)
_TRIED_BYTES = 2**28
#: The last tile of each sub-group is rounded up.
_ROUNDED_BYTES = 2**26


def options_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine of a row differs in, as ``make_engine`` takes it."""
    peer = options["peer"]
    if options["nvme"] is None or peer == IN_MEMORY:
        return {"nvme": None}
    folder = Path(options["nvme"], f"peer-{list(NVME_PEERS).index(peer)}")
    tuned = options["aio"] if peer in (TUNED, PIPELINED) else None
    return {"nvme": str(folder), "nvme_pipeline": peer == PIPELINED, "aio": tuned}


def host_memory(peer: str, master_bytes: int) -> int:
    """The bytes of state that a rank of this row keeps in memory, from the bytes of its masters."""
    state_bytes = 3 * master_bytes
    return {HALF: state_bytes // 2, ALL: state_bytes + _ROUNDED_BYTES}.get(peer, 0)


def fastest_aio(directory: str, cores: int) -> dict[str, Any] | None:
    """The settings with which DeepSpeed's aio op writes and reads a file in this directory fastest.

    Blocks for some seconds. Each is tried on a file of 256 MiB.

    Returns:
        A section ``aio`` of the DeepSpeed config; None where the process may not lock that much memory.
    """
    if not may_lock_bytes(_TRIED_BYTES):
        return None
    path, found = str(Path(directory, "aio")), []
    memory = make_handle(1).new_cpu_locked_tensor(_TRIED_BYTES // 4, torch.empty(0)).zero_()
    try:
        for threads, block_bytes in itertools.product(_THREADS, _BLOCK_BYTES):
            if threads <= max(1, cores):
                handle, seconds = make_handle(threads, block_bytes), []
                for _ in range(2):  # the first one makes the file
                    began = time.perf_counter()
                    handle.sync_pwrite(memory, path, 0)
                    handle.sync_pread(memory, path, 0)
                    seconds.append(time.perf_counter() - began)
                found.append((min(seconds), settings(threads, block_bytes)))
    finally:
        Path(path).unlink(missing_ok=True)
    return min(found, key=lambda each: each[0])[1]
