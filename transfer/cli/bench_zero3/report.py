"""How ``h2d bench zero3`` shows its result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from ...nvme.mounts import MEMORY_FILE_SYSTEMS
from ..measuring.table import console, hardware_line, make_table, mebibytes, number, verdict

_TIMES = (
    "copy-back",
    "step s",
    "spread\n%",
    "times\nDeepSpeed",
    "of the\nfloor",
    "copy-back\ns",
    "of the\nstep",
    "bits",
)
_MORE = ("copy-back", "iteration\ns", "times\nDeepSpeed", "pinned\nMiB", "locked\nMiB", "device\nMiB")

_NOTE = (
    "Medians of {steps} step{s}, in turn; ratios are medians of the rounds' ratios. Spread: the interquartile range of "
    "the step, in percent of its median. floor: the step with nothing copied back. copy-back: the step less the same "
    "round's floor. pinned: memory that the scheme needs in addition; locked: masters, or DeepSpeed's swap buffers, "
    "that it page-locks in place; device: peak memory above DeepSpeed's own. With several ranks each time is that of "
    "the slowest."
)


def show(report: Mapping[str, Any]) -> None:
    """Prints the table, what could not run, and what page-locking cost."""
    out, engine = console(), report["engine"]
    out.print(Text(hardware_line(report["hardware"], report["ranks"])))
    title = (
        f"{engine['parameters']:,} parameters ({report['layers']} layers of {report['hidden']}), "
        f"{len(engine['sub_group_elements'])} sub-groups a rank, {report['optimizer']}"
    )
    if report["nvme"] is not None:
        title += f"; {_swapped(report['nvme'], engine)}"
    out.print(make_table(title, _TIMES, [[_times(one) for one in report["measurements"]]]))
    out.print(make_table("whole iterations, and memory", _MORE, [[_more(one) for one in report["measurements"]]]))
    for entry in report["not_run"]:
        out.print(Text(f"not run: {entry['scheme']}: {entry['reason']}"))
    page_lock = report["page_lock"]
    if page_lock["seconds"]:
        what = "the masters" if report["nvme"] is None else "the swap buffers"
        out.print(
            Text(
                f"page-locking {what} ({engine['source_bytes'] / 2**30:.2f} GiB a rank) when attached: "
                f"{statistics.median(page_lock['seconds']):.3f} s, {page_lock['seconds_per_gib']:.3f} s per GiB"
            )
        )
    steps = max((len(one["step_seconds"]) for one in report["measurements"]), default=0)  # fewer, under a limit
    out.print(Text(_NOTE.format(steps=steps, s="s" * (steps != 1))))


def _swapped(nvme: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    kind = nvme["file_system"] or "an unknown file system"
    memory = " (which is memory and no drive)" if kind in MEMORY_FILE_SYSTEMS else ""
    count, of = engine["swapped_sub_groups"], len(engine["sub_group_elements"])
    how = ", pipelined" if nvme["pipelined"] else ""
    return f"the state of {'all' if count == of else f'{count} of {of}'} swapped to {kind}{memory}{how}"


def _name(one: Mapping[str, Any]) -> str:
    uses = f" ({one['selected']})" if one["scheme"] in ("default", "configured") else ""
    return f"{one['scheme']}{uses}"


def _times(one: Mapping[str, Any]) -> tuple[str | Text, ...]:
    figures = one["figures"]
    return (
        _name(one),
        number(figures["median_step_seconds"], ".3g"),
        number(figures["spread_percent"], ".0f"),
        number(figures["times_deepspeed"], ".2f", "x"),
        number(figures["times_floor"], ".2f", "x"),
        number(figures["copy_back_seconds"], ".3f"),
        number(figures["copy_back_share"], ".0%"),
        verdict(one["right_bits"]),
    )


def _more(one: Mapping[str, Any]) -> tuple[str | Text, ...]:
    figures = one["figures"]
    return (
        _name(one),
        number(figures["median_iteration_seconds"], ".3g"),
        number(figures["iteration_times_deepspeed"], ".2f", "x"),
        mebibytes(one["pinned_bytes"]),
        mebibytes(one["page_locked_bytes"]),
        mebibytes(figures["device_bytes"]),
    )
