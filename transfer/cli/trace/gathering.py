"""What is kept of a trace's events. Times are microseconds, as the format has them.

Kineto's names differ between vendors. CUDA tells what memory a copy leaves from; ROCm (`Memcpy HtoD (Host -> Device)`)
and XPU (`Memcpy M2D`) do not. ROCm has the size of a copy in the runtime's call alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .intervals import Intervals

PAGEABLE, PINNED, UNKNOWN = "pageable", "pinned", "not told"
_HOST_TO_DEVICE = re.compile(r"memcpy (htod|m2d)|copyhosttodevice", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep#\d+")
#: Of this package (``transfer.profiling``).
_OURS = "h2d/"
#: Calls of a runtime that hold the host until the device has done something, by parts of their names.
_WAITS = re.compile(r"synchronize|finish|queue.*wait|event.*wait", re.IGNORECASE)
_DOES_NOT_WAIT = re.compile(r"streamwaitevent", re.IGNORECASE)
#: A copy from pageable memory holds the host in its own call.
_COPY_CALL = re.compile(r"(cuda|hip|cu)memcpy", re.IGNORECASE)
#: A `copy_` of less time is not looked at: there are many.
_SHORT_OP = 100.0


@dataclass(frozen=True)
class Copy:
    """One copy from the host to the device, on the device's clock.

    Attributes:
        start: When it began.
        duration: How long it took.
        bytes: That have crossed the link; None where the trace has none.
        kind: The memory that it left from.
        correlation: Shared with the call that asked for it.
    """

    start: float
    duration: float
    bytes: int | None
    kind: str
    correlation: Any = None

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Range:
    """A range of this package: a copy that a strategy was asked for on the host, or what it did on the device."""

    start: float
    duration: float
    strategy: str
    stream: tuple[Any, Any]

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass
class Facts:
    """What a trace has of copies.

    Attributes:
        steps: Name, start and end of each ``ProfilerStep``.
        threads: Those in which the steps were marked.
        copies: From the host to the device.
        submitted: Ranges of this package on the host.
        made: The same on the device, where the profiler shows them.
        kernels: When each stream computed.
        waits: When each thread was held by the runtime, as it waited or as it copied.
        copy_ops: When each thread was in a long ``aten::copy_``, the cast included.
        sizes: Bytes of calls that copy, by correlation, where the runtime has them.
        first: The start of the first event.
        last: The end of the last one.
    """

    steps: list[tuple[str, float, float]] = field(default_factory=list)
    threads: set[tuple[Any, Any]] = field(default_factory=set)
    copies: list[Copy] = field(default_factory=list)
    submitted: list[Range] = field(default_factory=list)
    made: list[Range] = field(default_factory=list)
    kernels: dict[tuple[Any, Any], Intervals] = field(default_factory=dict)
    waits: dict[tuple[Any, Any], Intervals] = field(default_factory=dict)
    copy_ops: dict[tuple[Any, Any], Intervals] = field(default_factory=dict)
    sizes: dict[Any, int] = field(default_factory=dict)
    first: float = float("inf")
    last: float = float("-inf")


def gather(events: Iterable[Mapping[str, Any]]) -> Facts:
    """Reads events in any order."""
    facts = Facts()
    for event in events:
        if event.get("ph") == "X":
            start, duration = _number(event.get("ts")), _number(event.get("dur"))
            if start is not None and duration is not None:
                _take(facts, event, str(event.get("cat", "")).lower(), str(event.get("name", "")), start, duration)
    facts.copies = [
        replace(copy, bytes=facts.sizes.get(copy.correlation)) if copy.bytes is None else copy for copy in facts.copies
    ]
    return facts


def _take(facts: Facts, event: Mapping[str, Any], category: str, name: str, start: float, duration: float) -> None:
    place, end = (event.get("pid"), event.get("tid")), start + duration
    if category in ("trace", "overhead"):  # of the profiler's own
        return
    facts.first, facts.last = min(facts.first, start), max(facts.last, end)
    if category in ("gpu_memcpy", "memcpy"):
        if _HOST_TO_DEVICE.search(name):
            count, correlation = _argument(event, "bytes"), _argument(event, "correlation")
            facts.copies.append(Copy(start, duration, None if count is None else int(count), _kind(name), correlation))
    elif category == "kernel":
        facts.kernels.setdefault(place, Intervals()).add(start, end)
    elif "runtime" in category or "driver" in category:
        if _COPY_CALL.search(name) or (_WAITS.search(name) and not _DOES_NOT_WAIT.search(name)):
            facts.waits.setdefault(place, Intervals()).add(start, end)
            size, correlation = _argument(event, "size"), _argument(event, "correlation")
            if size is not None and correlation is not None:
                facts.sizes[correlation] = int(size)
    elif name.startswith(_OURS):
        ranges = facts.made if category == "gpu_user_annotation" else facts.submitted
        ranges.append(Range(start, duration, name.removeprefix(_OURS), place))
    elif _STEP.fullmatch(name):
        if category != "gpu_user_annotation":
            facts.steps.append((name, start, end))
            facts.threads.add(place)
    elif name == "aten::copy_" and duration >= _SHORT_OP:
        facts.copy_ops.setdefault(place, Intervals()).add(start, end)


def _kind(name: str) -> str:
    words = name.lower()
    return PAGEABLE if "pageable" in words else PINNED if "pinned" in words else UNKNOWN


def _argument(event: Mapping[str, Any], name: str) -> float | None:
    arguments = event.get("args")
    return _number(arguments.get(name)) if isinstance(arguments, dict) else None


def _number(value: Any) -> float | None:
    """Older writers put times into strings."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
