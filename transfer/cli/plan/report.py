"""What ``h2d plan`` prints: tables of 80 columns, where the rates come from, and how far off the model was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from ..measuring.quantities import format_count
from ..measuring.report import Column, console, make_table, number, plural, say, times
from .checks import COPY_BACK, ITERATION, ROUGH, STEP, by_way, gains

_seconds = number(".3g")
_gibibytes = number(",.1f", scale=2**-30)

_TIMES = (
    Column("way", "name"),
    Column("copy-\nback s", "copy_back_seconds", _seconds),
    Column("step\ns", "step_seconds", _seconds),
    Column("times\nDeep-\nSpeed", "step_times", times),
    Column("iter-\nation s", "iteration_seconds", _seconds),
    Column("times\nDeep-\nSpeed", "iteration_times", times),
)
_MEMORY = (
    Column("way", "name"),
    Column("host", "host_bytes", _gibibytes),
    Column("of it\npinned", "pinned_bytes", _gibibytes),
    Column("of it\nlocked", "page_locked_bytes", _gibibytes),
    Column("host of\na node", "node_bytes", _gibibytes),
    Column("device", "device_bytes", _gibibytes),
)
_QUANTITIES = {COPY_BACK: "copy-back", STEP: "step", ITERATION: "iteration"}
_CHECKS = (
    Column("way", "way"),
    Column("what", "quantity", lambda key: _QUANTITIES[key]),
    Column("runs", "runs", str),
    Column("off by", "off"),
)
#: Named in the machine's sentences, with the scale and the unit of each.
_RATES = {
    "host memory": ("memory", 1e9, "GB/s a rank"),
    "link": ("link", 1e9, "GB/s a rank"),
    "pageable copies": ("pageable", 1e9, "G elements/s"),
    "staged copies": ("staged", 1e9, "G elements/s"),
    "drive": ("drive", 1e9, "GB/s a rank"),
    "device": ("operations", 1e12, "TFLOP/s"),
    "network": ("between", 1e9, "GB/s"),
}

_NOTE = (
    "copy-back: what the step waits for masters on their way to the device. locked: ordinary memory that is "
    "page-locked in place. DeepSpeed, staging ring: with a copy-back through 2 x 2^26 elements. pageable and so on: "
    "with this package and that strategy. Memory is that of model states: parameters that are gathered, "
    "activations, torch and libraries come on top."
)


def show(report: Mapping[str, Any]) -> None:
    """Prints the plan of each number of nodes, and what is known of the model's errors."""
    out = console()
    for plan in report["plans"]:
        _show_plan(out, plan, report["profile"])
    say(out, _NOTE)
    _show_checks(out)


def _show_plan(out: Console, plan: Mapping[str, Any], profile: Mapping[str, Any] | None) -> None:
    job, ways = plan["job"], plan["ways"]
    where = "in files" if plan["rates"]["drive"] else "on the host"
    say(
        out,
        f"{job['parameters']:,} parameters in about {plural(job['layers'], 'layer')}; {plural(job['nodes'], 'node')} "
        f"of {plural(job['ranks'], 'rank')} with {plural(plan['threads'], 'host thread')}; {job['ratio']:.0%} of the "
        f"optimizer's state {where}, {format_count(job['sub_group_elements'])} elements a sub-group; "
        f"{job['tokens']:,} tokens a rank",
    )
    for name, source in plan["sources"].items():
        if name == "network" and job["ranks"] * job["nodes"] == 1:
            continue
        key, scale, unit = _RATES[name]
        say(out, f"  {name}: {plan['rates'][key] / scale:.3g} {unit}, {source}")
    for name in ("ranks", "threads"):
        here = job["ranks"] if name == "ranks" else plan["threads"]
        if profile is not None and max(here, profile[name]) > 1.5 * min(here, profile[name]):
            say(out, f"  The profile was measured with {profile[name]} {name}: `h2d tune --{name} {here}` would fit.")
    first = ways[0]
    rows = [
        {
            **way,
            "step_times": first["step_seconds"] / way["step_seconds"],
            "iteration_times": first["iteration_seconds"] / way["iteration_seconds"],
            "node_bytes": way["host_bytes"] * job["ranks"],
        }
        for way in ways
    ]
    out.print(make_table("seconds of each rank, predicted", _TIMES, [rows]))
    out.print(make_table("GiB of each rank, predicted", _MEMORY, [rows]))
    locked = max(row["page_locked_bytes"] for row in rows) * job["ranks"] / 2**30
    if not plan["rates"]["drive"]:
        say(
            out,
            f"pinned_direct page-locks {locked:,.1f} GiB of each node, where half of its memory may be, by default: "
            f"with less than {2 * locked:,.0f} GiB, pinned_staged serves the rest.",
        )


def _show_checks(out: Console) -> None:
    rows: list[dict[str, Any]] = []
    for (way, quantity), found in by_way().items():
        rows.append({"way": way, "quantity": quantity, "runs": len(found), "off": _range([each.off for each in found])})
    out.print(make_table("how far off the model was, on runs that it was not made from", _CHECKS, [rows]))
    rough = sorted({way for (way, _), found in by_way().items() if any(abs(each.off) > ROUGH for each in found)})
    say(
        out,
        "Positive: predicted more than measured. All runs were on H200s, and typical rates were taken: a profile of "
        f"your machine may do better. Off by more than {ROUGH:.0%} at least once, so not to be relied on: "
        f"{'; '.join(rough)}. Never compared with a run: pageable, pinned_staged and tiles with this package, more "
        "than one node, ratios below 1, devices other than H200.",
    )
    compared = list(gains())
    for quantity in (STEP, ITERATION):
        measured, predicted = zip(*(pair for _, what, *pair in compared if what == quantity), strict=True)
        say(
            out,
            f"DeepSpeed's {_QUANTITIES[quantity]} became {_least_and_most(measured)} times faster in "
            f"{plural(len(measured), 'run')}, where {_least_and_most(predicted)} was predicted.",
        )


def _least_and_most(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def _range(values: Sequence[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:+.0%}" if least == most else f"{least:+.0%} to {most:+.0%}"
