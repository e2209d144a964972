"""What ``h2d trace`` prints: tables of 80 columns, and a sentence on what follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...stats import format_bytes
from ..measuring.report import Column, console, make_table, number, percent, plural, say

_milliseconds = number(",.1f", scale=1e3)
_count = number(",.4g")
_GROUPS = {
    "pageable, small": "pageable, below 1 MiB",
    "pageable": "pageable",
    "pinned": "pinned",
    "not told": "not told by the trace",
}
_COPIES = (
    Column("from", "name"),
    Column("copies", "copies", _count),
    Column("MiB", "bytes", number(",.1f", scale=2**-20)),
    Column("ms on\nthe link", "seconds", _milliseconds),
    Column("GB/s", "bytes_per_second", number(".3g", scale=1e-9)),
    Column("ms of\n`copy_`", "host_seconds", _milliseconds),
    Column("under\nkernels", "under_kernels", percent),
    Column("host\nfree", "host_free", percent),
)
_RANGES = (
    Column("strategy", "strategy"),
    Column("copies", "copies", _count),
    Column("ms to\nsubmit", "submit_seconds", _milliseconds),
    Column("ms on the\ndevice", "device_seconds", _milliseconds),
    Column("under\nkernels", "under_kernels", percent),
    Column("host\nfree", "host_free", percent),
)
_WOULD = (
    Column("large copies from pageable memory", "name"),
    Column("ms a\nstep", "seconds", _milliseconds),
    Column("saved\nms", "saved", _milliseconds),
    Column("of the\nstep", "share", percent),
)
_NOTE = (
    "ms of `copy_`: the host's time in `aten::copy_`, with its cast. under kernels: the share of the copies' time in "
    "which the device computed; host free: in which no call of the runtime held the host."
)


def show(report: Mapping[str, Any]) -> None:
    """Prints the tables."""
    out, steps = console(), report["steps"]
    unit = f"a step of {plural(steps, 'step')}" if steps else "in the whole trace, which marks no steps (ProfilerStep)"
    say(out, f"{report['file']}: {report['events']:,} events; {report['step_seconds']:.4g} s {unit}")
    if report["copies_outside_steps"]:
        say(out, f"Copies outside of all steps, which are not counted: {report['copies_outside_steps']}")
    if report["groups"]:
        rows = [{**one, "name": _GROUPS[one["group"]]} for one in report["groups"]]
        out.print(make_table(f"copies from the host to the device, {'a step' if steps else 'in all'}", _COPIES, [rows]))
    if report["ranges"]:
        out.print(make_table("copies that this package has made", _RANGES, [report["ranges"]]))
    if report["groups"] or report["ranges"]:
        say(out, _NOTE)
    if report["sizes"]:
        sizes = ", ".join(f"{one['copies']:.4g} of {format_bytes(one['bytes'])}" for one in report["sizes"])
        say(out, f"Large copies from pageable memory{' a step' if steps else ''}: {sizes}.")
    _show_would(out, report)
    say(out, report["verdict"])


def _show_would(out: Any, report: Mapping[str, Any]) -> None:
    would, link = report["would"], report["link"]
    if would is None:
        return
    now = would["now_seconds"]
    rows = [{"name": "now" if would["cast_is_seen"] else "now, without the cast", "seconds": now}]
    for name, key in (
        ("pinned_staged, at best", "pinned_staged_seconds"),
        ("pinned_direct, waited for", "pinned_direct_seconds"),
        ("pinned_direct behind CPU Adam, at best", "behind_cpu_adam_seconds"),
    ):
        saved = now - would[key]
        share = saved / report["step_seconds"]
        rows.append({"name": name, "seconds": would[key], "saved": saved, "share": share})
    out.print(make_table(f"what would change, at {link['bytes_per_second'] / 1e9:.3g} GB/s", _WOULD, [rows]))
    say(out, f"GB/s of the link: {link['source']}. `pinned_direct` sends the source as it is, taken to be fp32.")


def verdict(found: Mapping[str, Any]) -> str:
    """One or two sentences on what to do."""
    would, groups = found["would"], {one["group"] for one in found["groups"]}
    ranges = " and ".join(one["strategy"] for one in found["ranges"])
    if found["ranges"] and "pageable" not in groups:
        return f"This package has made copies ({ranges}), and no large one leaves from pageable memory."
    if would is not None:
        share = would["now_seconds"] / found["step_seconds"]
        served = f" This package has made others ({ranges})." if ranges else ""
        return (
            f"Large copies from pageable memory take {share:.0%} of the time.{served} Of them, this package serves the "
            "copy-backs of ZeRO-3's masters (`h2d run`), and what your code copies through `build_transfer`; a trace "
            "does not say which they are. `h2d run --compare` measures what is gained."
        )
    if "not told" in groups:
        return (
            "This trace does not say what memory copies leave from: the profilers of ROCm and XPU do not. Below about "
            "10 GB/s they leave from pageable memory, as a rule."
        )
    return "No large copy leaves from pageable memory: there is nothing here that this package would make faster."
