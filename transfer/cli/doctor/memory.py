"""How much host memory there is, and how much of it may be page-locked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...memory.host_budget import local_ranks, page_lock_budget_bytes, total_bytes
from ...stats import format_bytes
from .finding import Finding, note, ok, unknown

#: DeepSpeed's swap buffers and this package's tiles together take less.
_ENOUGH_LOCKED = 2**30


def look(root: Path = Path("/")) -> Iterator[Finding]:
    """The memory of the host or its control group, what a rank may page-lock of it, and the limit of the process."""
    total, budget = total_bytes(root), page_lock_budget_bytes(root)
    if total is None or budget is None:
        yield unknown("host memory", "the system does not tell how much there is")
    else:
        ranks = local_ranks()
        yield ok("host memory", f"{format_bytes(total)}, of the host or its control group")
        yield ok("page-locked", f"at most {format_bytes(budget)} for each of {ranks} rank{'s' * (ranks != 1)}")
    yield _limit()


def _limit() -> Finding:
    try:
        import resource
    except ImportError:  # another system
        return unknown("ulimit -l", "this system has no such limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("ulimit -l", "unlimited")
    if soft >= _ENOUGH_LOCKED:
        return ok("ulimit -l", format_bytes(soft))
    most = "" if hard == resource.RLIM_INFINITY or hard > soft else ", which the administrator sets"
    return note(
        "ulimit -l",
        f"{format_bytes(soft)}",
        "unlimited, for optimizer state or parameters on NVMe",
        f"`ulimit -l unlimited`{most} (in containers: `--ulimit memlock=-1`). DeepSpeed's aio op aborts the process "
        "where it may not lock its buffers; memory on the host alone does not need it.",
    )
