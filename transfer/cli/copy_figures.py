"""The figures of ``h2d bench``, from what its worker measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .baselines import DEEPSPEED, WIRE
from .summary import median_ratio, slowest, spread_percent

Measurement = Mapping[str, Any]


def by_case(entries: Sequence[Measurement]) -> dict[tuple[str, int], list[Measurement]]:
    """Entries of the same dtype and size together, in the order in which they came."""
    cases: dict[tuple[str, int], list[Measurement]] = {}
    for entry in entries:
        cases.setdefault((entry["dtype"], entry["elements"]), []).append(entry)
    return cases


def with_figures(measurements: Sequence[Measurement]) -> Iterator[dict[str, Any]]:
    """Each measurement with ``seconds`` (the slowest rank's, for each round) and ``figures``."""
    for together in by_case(measurements).values():
        seconds = {one["scheme"]: slowest(one["seconds_by_rank"]) for one in together}
        for one in together:
            own = seconds[one["scheme"]]
            yield {**one, "seconds": own, "figures": _figures(one, own, seconds.get(WIRE), seconds.get(DEEPSPEED))}


def _figures(
    one: Measurement, seconds: Sequence[float], wire: Sequence[float] | None, deepspeed: Sequence[float] | None
) -> dict[str, float | None]:
    median = statistics.median(seconds)
    lock_seconds, source_gib = one["page_lock_seconds"], one["source_bytes"] / 2**30
    return {
        "median_seconds": median,
        "spread_percent": spread_percent(seconds),
        "gigabytes_per_second": one["destination_bytes"] / median / 1e9,
        "share_of_wire": median_ratio(wire, seconds),
        "times_deepspeed": median_ratio(deepspeed, seconds),
        "page_lock_seconds_per_gib": None if lock_seconds is None else lock_seconds / source_gib,
    }
