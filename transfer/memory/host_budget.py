"""How much host memory a process may page-lock: of the host or its control group, shared among local ranks."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

#: What launchers call the number of ranks on this host: torchrun, DeepSpeed's, those of MPI.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
)
#: SLURM's, for each node, such as ``8(x2),4``: of the step that this process belongs to, then of the whole job.
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
#: Half of the memory: the rest is for what the system and the program cannot do without.
_SHARE = 2


def local_ranks() -> int:
    """How many ranks run on this host, as their launcher says.

    Where it says only how many there are in all, every one of them may be here. 1 without a launcher.
    """
    counts = (_positive(os.environ.get(name, "")) for name in _LOCAL_RANKS)
    slurm = (_on_this_node(os.environ.get(name, "")) for name in _TASKS_PER_NODE)
    return next((count for count in (*counts, *slurm) if count), None) or _world_size()


def page_lock_budget_bytes(root: Path = Path("/")) -> int | None:
    """The most bytes that one rank may page-lock: half of the host's memory or the control group's, for all ranks.

    What a process has in memory takes no more room when it is locked, so it does not matter how much is free. What
    other processes have locked is not there to be locked again.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.

    Returns:
        The budget, or None where the system does not tell how much memory there is.
    """
    total = total_bytes(root)
    if total is None:
        return None
    for_all, locked = total // _SHARE, _kilobytes(root / "proc/meminfo").get("Mlocked", 0)
    if locked:
        locked = max(0, locked - _kilobytes(root / "proc/self/status").get("VmLck", 0))
    return max(0, min(for_all // local_ranks(), for_all - locked))


@functools.cache  # asked for each source that is prepared, and half a millisecond in many files
def total_bytes(root: Path) -> int | None:
    """The memory of the host, or of the control group if that is less. A limit that changes counts in new processes."""
    meminfo = _kilobytes(root / "proc/meminfo")
    host = meminfo.get("MemTotal")
    if host is None and root == Path("/"):
        host = _physical_bytes()
    limits = [limit for limit in map(_limit, _groups(root)) if limit is not None]
    if host is not None:
        limits.append(host - meminfo.get("Hugetlb", 0))  # huge pages are set apart
    return min(limits, default=None)


def _positive(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _on_this_node(text: str) -> int | None:
    """The entry of this node in SLURM's list; the largest, where the node has no number in it."""
    if re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text) is None:
        return None
    counts = [
        int(tasks) for tasks, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(repeated or 1))
    ]
    node = os.environ.get("SLURM_NODEID", "")
    here = counts[int(node)] if node.isdecimal() and int(node) < len(counts) else max(counts, default=0)
    return here or None


def _world_size() -> int:
    """How many ranks there are, as the environment or torch says; 1 where there is no job."""
    known = _positive(os.environ.get("WORLD_SIZE", ""))
    if known is not None:
        return known
    import torch.distributed

    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if started else 1


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # another system
        return None


def _kilobytes(path: Path) -> dict[str, int]:
    """The lines ``Name:   123 kB`` of a file, in bytes."""
    found = re.findall(r"(?m)^(\w+):\s+(\d+) kB$", "\n".join(_lines(path)))
    return {name: int(number) * 1024 for name, number in found}


def _groups(root: Path) -> list[Path]:
    """Where the control group's limit stands, and those above it, any of which may have one."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        here = top / path.strip().lstrip("/")
        # In a container, the path is often the host's, and the files are at the top.
        groups = [each for each in dict.fromkeys((here, *here.parents, top)) if each == top or top in each.parents]
        found += [group / ("memory.max" if controllers == "" else "memory.limit_in_bytes") for group in groups]
    return found


def _limit(path: Path) -> int | None:
    return _positive(next(iter(_lines(path)), ""))  # also where it says "max"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or a group without this file
        return []
