"""The figures of ``h2d bench``, from what its worker measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..measuring.baselines import DEEPSPEED, WIRE
from ..measuring.statistics import median_ratio, slowest, spread_percent
from .file_baselines import DEEPSPEED_FROM_NVME, RAW_READ

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
        readers = [own for name, own in seconds.items() if name.startswith(RAW_READ)]
        best_reader = min(readers, key=statistics.median, default=None)
        for one in together:
            own = seconds[one["scheme"]]
            ratios = {
                "share_of_wire": median_ratio(seconds.get(WIRE), own),
                "times_deepspeed": median_ratio(seconds.get(DEEPSPEED), own),
            }
            if one["from_file"]:
                ratios["share_of_raw_read"] = median_ratio(best_reader, own)
                ratios["times_deepspeed_from_nvme"] = median_ratio(seconds.get(DEEPSPEED_FROM_NVME), own)
            yield {**one, "seconds": own, "figures": {**_figures(one, own), **ratios}}


def _figures(one: Measurement, seconds: Sequence[float]) -> dict[str, float | None]:
    median = statistics.median(seconds)
    lock_seconds, source_gib = one["page_lock_seconds"], one["source_bytes"] / 2**30
    read = {"read_gigabytes_per_second": one["source_bytes"] / median / 1e9} if one["from_file"] else {}
    return {
        "median_seconds": median,
        "spread_percent": spread_percent(seconds),
        "gigabytes_per_second": one["destination_bytes"] / median / 1e9,
        "page_lock_seconds_per_gib": None if lock_seconds is None else lock_seconds / source_gib,
        **read,
    }
