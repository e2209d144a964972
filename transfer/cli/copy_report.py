"""How ``h2d bench`` shows its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from .baselines import SUMMARIES
from .copy_figures import by_case
from .quantities import shown
from .table import console, hardware_line, legend, make_table, mebibytes, number, verdict

_COLUMNS = (
    "scheme",
    "median\nms",
    "spread\n%",
    "GB/s",
    "of the\nwire",
    "times\nDeepSpeed",
    "pinned\nMiB",
    "locked\nMiB",
    "device\nMiB",
    "bits",
)

_NOTE = (
    "Medians of {rounds} round{s}, in each of which every scheme copies once; ratios are medians of the rounds' "
    "ratios. "
    "Spread: the interquartile range, in percent of the median. GB/s: destination bytes of one rank. pinned, device: "
    "memory that the scheme needs in addition; locked: the source's own memory, page-locked in place. With several "
    "ranks each time is that of the slowest."
)


def show(report: Mapping[str, Any]) -> None:
    """Prints one table for each size and dtype, and what could not run."""
    out = console()
    out.print(Text(hardware_line(report["hardware"], report["ranks"])))
    refused = by_case(report["not_run"])
    for (dtype, elements), measurements in by_case(report["measurements"]).items():
        title = f"{shown(elements)} elements, float32 on the host to {dtype} on the device"
        groups = [[_row(one) for one in measurements if one["kind"] == kind] for kind in ("baseline", "strategy")]
        out.print(make_table(title, _COLUMNS, groups))
        for entry in refused.get((dtype, elements), ()):
            out.print(Text(f"not run: {entry['scheme']}: {entry['reason']}"))
        for one in measurements:
            if one["page_lock_seconds"] is not None:
                per_gib = one["figures"]["page_lock_seconds_per_gib"]
                out.print(Text(f"{one['scheme']}: page-locking its source took {per_gib:.3f} s per GiB, once"))
    out.print(Text(_NOTE.format(rounds=report["rounds"], s="s" * (report["rounds"] != 1))))
    ran = [name for name in SUMMARIES if any(one["scheme"] == name for one in report["measurements"])]
    out.print(legend((name, SUMMARIES[name]) for name in ran))


def _row(one: Mapping[str, Any]) -> tuple[str | Text, ...]:
    figures = one["figures"]
    return (
        one["scheme"],
        number(figures["median_seconds"] * 1e3, ".4g"),
        number(figures["spread_percent"], ".0f"),
        number(figures["gigabytes_per_second"], ".3g"),
        number(figures["share_of_wire"], ".0%"),
        number(figures["times_deepspeed"], ".2f", "x"),
        mebibytes(one["pinned_bytes"]),
        mebibytes(one["page_locked_bytes"]),
        mebibytes(one["device_bytes"]),
        verdict(one["right_bits"]),
    )
