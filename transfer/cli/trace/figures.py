"""Numbers of a trace: copies a step, how much of them was hidden, and what would change."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .gathering import PAGEABLE, PINNED, UNKNOWN, Copy, Facts, Range
from .intervals import Intervals, union

#: The default policy leaves smaller copies of sources that are not page-locked as they are (``transfer.policy``).
LEAST_BYTES = 2**20
#: Copies from pinned memory of at least so many bytes show what the link reaches.
_LARGE_BYTES = 4 * 2**20
#: 512 MiB took 10.2 ms over PCIe 5 x16 (examples/figures/copy_h200_12_threads.json).
TYPICAL_LINK = 2**29 / 0.01018
_MOST_SIZES = 5


def figures(facts: Facts, link: float | None = None) -> dict[str, Any]:
    """What `h2d trace` reports; seconds and bytes of a step are means of all steps.

    Args:
        facts: Of the trace.
        link: Bytes a second of the link; None: what large copies from pinned memory reached, else a typical value.
    """
    steps = sorted(facts.steps, key=lambda step: step[1]) or [("the whole trace", facts.first, facts.last)]
    inside = Intervals((start, end) for _, start, end in steps)
    copies = [copy for copy in facts.copies if _is_in(inside, copy.start)]
    per_step = _PerStep(facts, len(steps))
    groups = {
        "pageable, small": [copy for copy in copies if copy.kind == PAGEABLE and not _served(copy)],
        "pageable": [copy for copy in copies if copy.kind == PAGEABLE and _served(copy)],
        "pinned": [copy for copy in copies if copy.kind == PINNED],
        "not told": [copy for copy in copies if copy.kind == UNKNOWN],
    }
    candidates = groups["pageable"]
    rate, source = _link(facts.copies, link)
    return {
        "steps": len(facts.steps),
        "step_seconds": statistics.median(end - start for _, start, end in steps) / 1e6,
        "copies_outside_steps": len(facts.copies) - len(copies),
        "groups": [{"group": name, **per_step.copies(own)} for name, own in groups.items() if own],
        "sizes": _sizes(candidates, len(steps)),
        "ranges": per_step.ranges(inside),
        "link": {"bytes_per_second": rate, "source": source},
        "would": _would(candidates, per_step, rate),
    }


class _PerStep:
    """Sums of a step, and the time in which other work went on."""

    def __init__(self, facts: Facts, steps: int) -> None:
        self._facts, self._steps = facts, steps
        made = {stream: Intervals() for stream in facts.kernels}
        for each in facts.made:
            made.setdefault(each.stream, Intervals()).add(each.start, each.end)
        # A strategy's own kernels are copies; what else a stream computes is work that may hide them.
        self._computing = union(kernels.without(made[stream]) for stream, kernels in facts.kernels.items())
        known = facts.threads & set(facts.waits)
        most = max(facts.waits, key=lambda thread: facts.waits[thread].length(), default=None)
        self._held = union(facts.waits[thread] for thread in known or ([most] if most is not None else []))
        self._knows_host = bool(facts.waits)

    def copies(self, copies: Sequence[Copy]) -> dict[str, Any]:
        """Of some copies."""
        sizes = [copy.bytes for copy in copies if copy.bytes is not None]
        seconds = sum(copy.duration for copy in copies) / 1e6
        return {
            "copies": len(copies) / self._steps,
            "bytes": sum(sizes) / self._steps if len(sizes) == len(copies) else None,
            "seconds": seconds / self._steps,
            "bytes_per_second": sum(sizes) / seconds if sizes and len(sizes) == len(copies) and seconds else None,
            "host_seconds": self.host_seconds(copies),
            **self._hidden(copies),
        }

    def ranges(self, inside: Intervals) -> list[dict[str, Any]]:
        """Of this package's ranges, by strategy."""
        submitted = [each for each in self._facts.submitted if _is_in(inside, each.start)]
        made = [each for each in self._facts.made if _is_in(inside, each.start)]
        found = []
        for strategy in dict.fromkeys(each.strategy for each in (*submitted, *made)):
            on_host = [each for each in submitted if each.strategy == strategy]
            on_device = [each for each in made if each.strategy == strategy]
            found.append(
                {
                    "strategy": strategy,
                    "copies": len(on_host) / self._steps,
                    "submit_seconds": sum(each.duration for each in on_host) / 1e6 / self._steps,
                    "device_seconds": sum(each.duration for each in on_device) / 1e6 / self._steps
                    if on_device
                    else None,
                    **self._hidden(on_device),
                }
            )
        return found

    def host_seconds(self, copies: Sequence[Copy]) -> float | None:
        """How long a thread was in the ``copy_`` of each of these, the cast included; None where none is seen."""
        found: set[tuple[float, float]] = set()
        for copy in copies:
            for ops in self._facts.copy_ops.values():
                parts = ops.parts()
                index = _last_before(parts, copy.start)
                if index is not None and parts[index][1] >= copy.end - 1:
                    found.add(parts[index])
        return sum(end - start for start, end in found) / 1e6 / self._steps if found else None

    def _hidden(self, spans: Iterable[Copy | Range]) -> dict[str, float | None]:
        spans = list(spans)
        whole = sum(each.duration for each in spans)
        if not whole:
            return {"under_kernels": None, "host_free": None}
        under = sum(self._computing.within(each.start, each.end) for each in spans)
        held = sum(self._held.within(each.start, each.end) for each in spans)
        return {"under_kernels": under / whole, "host_free": max(0.0, 1 - held / whole) if self._knows_host else None}


def _would(candidates: Sequence[Copy], per_step: _PerStep, rate: float) -> dict[str, Any] | None:
    """What the step waits for candidates now, and with each strategy, in seconds.

    `pinned_direct` sends the source as it is. The trace has the bytes that have crossed the link, which the host has
    cast before: the source of a 16-bit copy is taken to be fp32, so twice as many bytes cross then.
    """
    if not candidates:
        return None
    of_copies = per_step.copies(candidates)
    crossed = of_copies["bytes"]
    if crossed is None:
        return None
    waited = of_copies["host_seconds"]
    return {
        "now_seconds": of_copies["seconds"] if waited is None else waited,
        "cast_is_seen": waited is not None,
        "pinned_staged_seconds": crossed / rate,
        "pinned_direct_seconds": 2 * crossed / rate,
        "behind_cpu_adam_seconds": 0.0,
    }


def _link(copies: Sequence[Copy], given: float | None) -> tuple[float, str]:
    if given is not None:
        return given, "as given"
    large = [copy.bytes / copy.duration * 1e6 for copy in copies if _shows_the_link(copy)]  # type: ignore[operator]
    if large:
        return statistics.median(large), "the median of the large copies from pinned memory in this trace"
    return TYPICAL_LINK, "typical of PCIe 5 x16; --link gives another"


def _shows_the_link(copy: Copy) -> bool:
    return copy.kind == PINNED and copy.bytes is not None and copy.bytes >= _LARGE_BYTES and copy.duration > 0


def _sizes(copies: Sequence[Copy], steps: int) -> list[Mapping[str, float]]:
    """The sizes that move most bytes."""
    count: dict[int, int] = {}
    for copy in copies:
        if copy.bytes is not None:
            count[copy.bytes] = count.get(copy.bytes, 0) + 1
    most = sorted(count, key=lambda size: -size * count[size])[:_MOST_SIZES]
    return [{"bytes": size, "copies": count[size] / steps} for size in most]


def _served(copy: Copy) -> bool:
    """Whether the default policy would not leave it as it is. Copies of unknown size are taken to be large."""
    return copy.bytes is None or copy.bytes >= LEAST_BYTES


def _is_in(intervals: Intervals, time: float) -> bool:
    parts = intervals.parts()
    index = _last_before(parts, time)
    return index is not None and (time < parts[index][1] or parts[index][0] == time)


def _last_before(parts: Sequence[tuple[float, float]], time: float) -> int | None:
    from bisect import bisect_right

    index = bisect_right(parts, (time, float("inf"))) - 1
    return index if index >= 0 else None
