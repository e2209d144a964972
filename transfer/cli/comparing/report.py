"""What ``h2d run --compare`` says: medians, spread, ratios of pairs of blocks, and what was compared bit for bit."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..measuring.hardware import describe
from ..measuring.report import Column, hardware_line, make_table, number, plural, say, slowest, spread_percent, verdict
from .turns import DEEPSPEED, OURS

SCHEMA_VERSION = 1
_WAYS = (DEEPSPEED, OURS)
_COLUMNS = (
    Column("way", "way"),
    Column("steps", "steps", str),
    Column("step\ns", "step_seconds", number(".3g")),
    Column("spread\n%", "step_spread_percent", number(".0f")),
    Column("iter-\nation s", "iteration_seconds", number(".3g")),
    Column("spread\n%", "iteration_spread_percent", number(".0f")),
)


def make(every: Sequence[Mapping[str, Any]], accelerator: Any) -> dict[str, Any]:
    """The result of a comparison.

    Args:
        every: What each rank has. A step takes as long as its slowest rank.
        accelerator: In use, to describe the machine.
    """
    ways: list[dict[str, Any]] = []
    medians: dict[str, dict[str, dict[int, float]]] = {"step": {}, "iteration": {}}
    for way in _WAYS:
        own = [[each for each in rank["counted"] if each[0] == way] for rank in every]
        pairs = [each[1] for each in own[0]]
        one: dict[str, Any] = {"way": way, "steps": len(pairs), "pairs": pairs}
        for name, index in (("step", 2), ("iteration", 3)):
            seconds = slowest([[each[index] for each in rank] for rank in own])
            by_pair: dict[int, list[float]] = {}
            for pair, value in zip(pairs, seconds, strict=True):
                by_pair.setdefault(pair, []).append(value)
            medians[name][way] = {pair: statistics.median(values) for pair, values in by_pair.items()}
            one[f"all_{name}_seconds"] = seconds
            one[f"{name}_seconds"] = statistics.median(seconds)
            one[f"{name}_spread_percent"] = spread_percent(seconds)
        ways.append(one)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "run --compare",
        "hardware": describe(accelerator),
        "ranks": len(every),
        "ways": ways,
        "times_faster": {
            name: [found[DEEPSPEED][pair] / found[OURS][pair] for pair in sorted(found[OURS])]
            for name, found in medians.items()
        },
        "bits": {
            "equal": _equal(every),
            "steps": every[0]["compared_steps"],
            "partitions": sum(each["compared_partitions"] for each in every),
            "partitions_that_differ": sum(each["partitions_that_differ"] for each in every),
            "not_compared": next((each["not_compared"] for each in every if each["not_compared"]), None),
        },
    }


def tell(result: Mapping[str, Any], warn: Callable[[str], object], file: str | None) -> None:
    """Prints the result on the standard error, as the standard output is the script's; writes it to a file if asked."""
    out = Console(stderr=True, highlight=False)
    if not out.is_terminal:
        out = Console(file=sys.stderr, highlight=False, width=80)
    say(out, hardware_line(result["hardware"], result["ranks"]))
    out.print(make_table("steps of this script, by turns", _COLUMNS, [result["ways"]]))
    for name, ratios in result["times_faster"].items():
        say(out, f"{name} {_times(ratios)}")
    if result["hardware"]["accelerator"] in ("simulated", "cpu"):
        say(out, "There is no device here: the bits mean something, the times do not.")
    bits = result["bits"]
    if bits["equal"] is None:
        say(out, f"bits: not compared: {bits['not_compared'] or 'no partition was in memory'}")
    else:
        out.print(Text("bits: ").append_text(verdict(bits["equal"])).append(f". {_what(bits)}"))
    if file is not None:
        try:
            Path(file).write_text(json.dumps(result, indent=1))
        except OSError as error:
            warn(f"{file} cannot be written: {error.strerror}")


def _equal(every: Sequence[Mapping[str, Any]]) -> bool | None:
    if any(each["not_compared"] for each in every) or not any(each["compared_partitions"] for each in every):
        return None
    return not any(each["partitions_that_differ"] for each in every)


def _times(ratios: Sequence[float]) -> str:
    middle = statistics.median(ratios)
    span = f", {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
    return f"{middle:.2f} times as fast with this package (median of {plural(len(ratios), 'pair')} of blocks{span})"


def _what(bits: Mapping[str, Any]) -> str:
    differ = f" {bits['partitions_that_differ']} differ." if bits["partitions_that_differ"] else ""
    return (
        f"After each of {plural(bits['steps'], 'counted step')}, of both ways, each low-precision partition was "
        f"compared with torch's cast of its master on the host, all bits: {plural(bits['partitions'], 'comparison')}."
        f"{differ} The masters themselves cannot be compared, as each step is made once; `h2d demo` trains twice."
    )
