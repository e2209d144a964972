"""Figures and a table of the peers of ``h2d bench zero3``, whose processes take turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from ..measuring.names import DEEPSPEED
from ..measuring.report import Column, make_table, median_ratio, number, plural, say, slowest, times, verdict
from .phases import Phases
from .rows import NVME_PEERS

_PAIRS = 12  #: With fewer, quartiles say little.
#: What has the same bits without this package.
_ALONE = {"offload_param, default": "offload_param"} | dict.fromkeys(
    ("default", *(name for name in NVME_PEERS if name != DEEPSPEED)), DEEPSPEED
)


def _seconds_text(value: float) -> str:
    """Three digits behind the point, or in all."""
    return f"{value:.3f}" if value < 10 else f"{value:.3g}"


_gibibytes = number(".2f", scale=2**-30)

_COLUMNS = (
    Column("peer", "variant"),
    Column("for-\nward s", "median_forward_seconds", _seconds_text),
    Column("back-\nward s", "median_backward_seconds", _seconds_text),
    Column("step\ns", "median_step_seconds", _seconds_text),
    Column("whole\ns", "median_iteration_seconds", _seconds_text),
    Column("times\nDeep-\nSpeed", "times_deepspeed", times),
    Column("peak\nGiB", "peak_bytes", _gibibytes),
    Column("bytes\na par.", "bytes_a_parameter", number(".1f")),
    Column("bits", "right_bits", verdict),
)
_NOTE = (
    "Peers: medians of {pairs} of iterations, one of each peer a round, quartiles of the whole iteration: {quartiles}. "
    "whole: the iteration. peak: resident memory of the process at its highest, of all ranks together. bytes a par.: "
    "memory that is resident after the last iteration, less what was before the model was made, for each parameter; "
    "where the system does not count pinned memory as resident, it is missing, and {pinned}. bits: the masters' "
    "against those without this package, after two iterations by deterministic algorithms."
)


def with_figures(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each peer's measurement with its seconds (the slowest rank's in each round), ``right_bits`` and ``figures``."""
    iterations = {name: _seconds(one)["iteration"] for name, one in measured.items()}
    for name, one in measured.items():
        seconds = _seconds(one)
        alone = measured.get(_ALONE.get(name, ""))
        own = [each["now"] - each["before"] for each in one["host_bytes_by_rank"]]
        reference = iterations.get(DEEPSPEED)
        pinned = [each["pinned"] for each in one["host_bytes_by_rank"]]
        yield {
            **one,
            "variant": name,
            "right_bits": None if alone is None else one["digests"] == alone["digests"],
            **{f"{phase}_seconds": values for phase, values in seconds.items()},
            "figures": {
                **{f"median_{phase}_seconds": statistics.median(values) for phase, values in seconds.items()},
                "iteration_quartiles": quartiles(seconds["iteration"]),
                "times_deepspeed": median_ratio(reference, seconds["iteration"]),
                "peak_bytes": sum(each["peak"] for each in one["host_bytes_by_rank"]),
                "pinned_bytes": None if None in pinned else sum(pinned),
                "bytes_a_parameter": sum(own) / one["parameters"],
            },
        }


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one; of a single measurement, itself twice."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return lower, upper


def show_peers(out: Console, peers: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table and what its columns mean."""
    out.print(make_table("peers, in processes of their own", _COLUMNS, [peers]))
    rounds = len(peers[0]["iteration_seconds"])
    ranges = ("{} {:.3f} to {:.3f} s".format(one["variant"], *one["figures"]["iteration_quartiles"]) for one in peers)
    pinned = [
        f"{one['variant']} {one['figures']['pinned_bytes'] / 2**30:.2f} GiB"
        for one in peers
        if one["figures"]["pinned_bytes"] is not None
    ]
    known = f"torch's allocator has pinned: {'; '.join(pinned)}" if pinned else "how much it is, is not known here"
    say(out, _NOTE.format(pairs=plural(rounds, "round"), quartiles="; ".join(ranges), pinned=known))
    if rounds < _PAIRS:
        say(out, f"Fewer than {_PAIRS} rounds: quartiles say little.")
    for one in peers:
        if one["note"] is not None:
            say(out, f"{one['variant']}: {one['note']}")


def _seconds(one: Mapping[str, Any]) -> dict[str, list[float]]:
    by_rank = [[Phases(*each) for each in phases] for phases in one["phases_by_rank"]]
    seconds = {
        phase: slowest([[getattr(each, phase) for each in phases] for phases in by_rank]) for phase in Phases._fields
    }
    return {**seconds, "iteration": slowest([[sum(each) for each in phases] for phases in by_rank])}
