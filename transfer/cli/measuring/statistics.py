"""Figures from raw seconds. Ratios are taken round by round, so that a drifting machine cancels out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def slowest(seconds_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each round, the time of the rank that took longest: until then the others wait for it."""
    return [max(values) for values in zip(*seconds_by_rank, strict=True)]


def spread_percent(seconds: Sequence[float]) -> float:
    """The interquartile range as a percentage of the median; 0 for a single measurement."""
    if len(seconds) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return 100 * (upper - lower) / middle


def median_ratio(numerators: Sequence[float] | None, denominators: Sequence[float]) -> float | None:
    """The median of the rounds' ratios; None where the numerators were not measured."""
    if numerators is None:
        return None
    return statistics.median(above / below for above, below in zip(numerators, denominators, strict=True))
