"""The figures of ``h2d bench zero3``, from what its worker measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..measuring.baselines import DEEPSPEED
from ..measuring.statistics import median_difference, median_ratio, slowest, spread_percent

#: The scheme that copies nothing back: the least time that any copy-back could leave.
FLOOR = "floor"


def with_figures(measurements: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each measurement with its seconds (the slowest rank's, for each round) and ``figures``.

    The copy-back that the host sees is the step's time less that of the same round's floor: whatever a
    scheme does, in the copy-back or at the step's end, it can only be there.
    """
    steps = {one["scheme"]: slowest(one["step_seconds_by_rank"]) for one in measurements}
    iterations = {one["scheme"]: slowest(one["iteration_seconds_by_rank"]) for one in measurements}
    rises = {one["scheme"]: one["memory_rise_bytes"] for one in measurements}
    for one in measurements:
        step, iteration = steps[one["scheme"]], iterations[one["scheme"]]
        copy_back = [seconds - least for seconds, least in zip(step, steps[FLOOR], strict=True)]
        figures = {
            "median_step_seconds": statistics.median(step),
            "median_iteration_seconds": statistics.median(iteration),
            "spread_percent": spread_percent(step),
            "times_deepspeed": median_ratio(steps[DEEPSPEED], step),
            "iteration_times_deepspeed": median_ratio(iterations[DEEPSPEED], iteration),
            "times_floor": median_ratio(step, steps[FLOOR]),
            "copy_back_seconds": median_difference(step, steps[FLOOR]),
            "copy_back_share": median_ratio(copy_back, step),
            "device_bytes": _device_bytes(one, rises[DEEPSPEED]),
        }
        yield {**one, "step_seconds": step, "iteration_seconds": iteration, "figures": figures}


def _device_bytes(one: Mapping[str, Any], deepspeed_rise: int | None) -> int | None:
    """Device memory above DeepSpeed's own: what the transfer holds, and what more its steps take for a while."""
    if one["memory_rise_bytes"] is None or deepspeed_rise is None:
        return None
    return int(one["scratch_bytes"] + one["memory_rise_bytes"] - deepspeed_rise)
