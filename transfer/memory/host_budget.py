"""How much host memory a process may take: of the host, of its control group, shared among local ranks."""

from __future__ import annotations

import os
from pathlib import Path

#: Launchers name the number of local ranks differently: torchrun, DeepSpeed's, MPI's, SLURM's.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def local_ranks() -> int:
    """How many ranks of the job run on this host, as its launcher says; 1 without a launcher."""
    for name in _LOCAL_RANKS:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return 1


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated without swapping, in the host and in the control group.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.

    Returns:
        The smaller of the two, or None where the system tells neither.
    """
    limits = [_host_bytes(root / "proc/meminfo"), *(_group_bytes(each) for each in _groups(root))]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _host_bytes(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> list[tuple[Path, Path, Path]]:
    """The files of the control group and of those above it, any of which may have a limit: limit, usage, statistics."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current") if controllers == "" else _VERSION_1
        here = top / path.strip().lstrip("/")
        # In a container, the path is often the host's, and the files are at the top.
        groups = [each for each in dict.fromkeys((here, *here.parents, top)) if each == top or top in each.parents]
        found += [(group / names[0], group / names[1], group / "memory.stat") for group in groups]
    return found


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _group_bytes(files: tuple[Path, Path, Path]) -> int | None:
    limit, usage = (next(iter(_lines(path)), "") for path in files[:2])
    if not (limit.isdecimal() and usage.isdecimal()):  # also where the limit says "max"
        return None
    # What the page cache holds is given up when memory is wanted.
    cached = [
        line.split()[1] for line in _lines(files[2]) if line.startswith(("inactive_file ", "total_inactive_file "))
    ]
    return int(limit) - int(usage) + max((int(each) for each in cached), default=0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or a group without this file
        return []
