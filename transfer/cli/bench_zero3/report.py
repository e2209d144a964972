"""What ``h2d bench zero3`` makes of raw seconds: figures for its JSON, and tables of 80 columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..measuring.names import DEEPSPEED, NO_COPY_BACK
from ..measuring.report import (
    WIDE,
    Column,
    console,
    figures,
    file_system_name,
    hardware_line,
    make_table,
    mebibytes,
    median_ratio,
    number,
    one_table,
    percent,
    plural,
    reasons,
    say,
    say_first,
    slowest,
    spread_percent,
    times,
    verdict,
)
from .peer_report import show_peers

Seconds = Sequence[float]


@dataclass(frozen=True)
class _Row:
    """One measurement, and the seconds of every variant for each round.

    The copy-back that the host sees is the step's time less that of the same round without a copy-back: this holds
    what a variant does in the copy-back and what it does at the step's end.
    """

    one: Mapping[str, Any]
    steps: Mapping[str, Seconds]
    iterations: Mapping[str, Seconds]
    deepspeed_rise: int | None

    def median(self, phase: str) -> float:
        return statistics.median(slowest(self.one[f"{phase}_seconds_by_rank"]))

    @property
    def step(self) -> Seconds:
        return self.steps[self.one["variant"]]

    @property
    def iteration(self) -> Seconds:
        return self.iterations[self.one["variant"]]

    @property
    def copy_back(self) -> Seconds:
        return [seconds - least for seconds, least in zip(self.step, self.steps[NO_COPY_BACK], strict=True)]

    def device_bytes(self) -> int | None:
        """Device memory above DeepSpeed's own: what the transfer holds, and what more its steps take for a while."""
        rise = self.one["memory_rise_bytes"]
        if rise is None or self.deepspeed_rise is None:
            return None
        return int(self.one["scratch_bytes"] + rise - self.deepspeed_rise)


_STEPS = (
    Column("copy-back", "name"),
    Column("step\ns", "median_step_seconds", number(".3g"), lambda row: statistics.median(row.step)),
    Column("spread\n%", "spread_percent", number(".0f"), lambda row: spread_percent(row.step)),
    Column("times\nDeep-\nSpeed", "times_deepspeed", times, lambda row: median_ratio(row.steps[DEEPSPEED], row.step)),
    Column("of the\nbound", "times_lower_bound", times, lambda row: median_ratio(row.step, row.steps[NO_COPY_BACK])),
    Column("copy-\nback s", "copy_back_seconds", number(".3f"), lambda row: statistics.median(row.copy_back)),
    Column("of the\nstep", "copy_back_share", percent, lambda row: median_ratio(row.copy_back, row.step)),
    Column("bits", "right_bits", verdict),
)
#: Not in records of schema 2.
_PHASES = (
    Column("for-\nward s", "median_forward_seconds", number(".3f"), lambda row: row.median("forward")),
    Column("back-\nward s", "median_backward_seconds", number(".3f"), lambda row: row.median("backward")),
)
_ITERATIONS = (
    Column("copy-back", "name"),
    *_PHASES,
    Column("whole\ns", "median_iteration_seconds", number(".3f"), lambda row: statistics.median(row.iteration)),
    Column(
        "times\nDeep-\nSpeed",
        "iteration_times_deepspeed",
        times,
        lambda row: median_ratio(row.iterations[DEEPSPEED], row.iteration),
    ),
)
_MEMORY = (
    Column("copy-back", "name"),
    Column("pinned\nMiB", "pinned_bytes", mebibytes),
    Column("locked\nMiB", "page_locked_bytes", mebibytes),
    Column("device\nMiB", "device_bytes", mebibytes, _Row.device_bytes),
)

_NOTE = (
    "Medians of {steps}, in turn; ratios are medians of the rounds' ratios. Spread: the interquartile range of "
    "the step, in percent of its median. whole: the iteration. no stream: gradients go to the host as DeepSpeed sends "
    "them. bound: the lower bound, a step with no copy-back. copy-back: the step less "
    "the same round's lower bound. pinned: memory that the variant needs in addition; locked: masters, or "
    "DeepSpeed's swap buffers, that it page-locks in place; device: peak memory above DeepSpeed's own. With several "
    "ranks each time is that of the slowest."
)


def with_figures(measurements: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each measurement with its seconds (the slowest rank's, for each round) and ``figures``."""
    steps = {one["variant"]: slowest(one["step_seconds_by_rank"]) for one in measurements}
    iterations = {one["variant"]: slowest(one["iteration_seconds_by_rank"]) for one in measurements}
    rises = {one["variant"]: one["memory_rise_bytes"] for one in measurements}
    for one in measurements:
        row = _Row(one, steps, iterations, rises[DEEPSPEED])
        own = {"step_seconds": row.step, "iteration_seconds": row.iteration}
        absent = () if "forward_seconds_by_rank" in one else _PHASES
        columns = [column for column in (*_STEPS, *_ITERATIONS, *_MEMORY) if column not in absent]
        yield {**one, **own, "figures": figures(columns, row)}


def page_lock(measured: Mapping[str, Any]) -> dict[str, Any]:
    """What it took to page-lock the sources, on the slowest rank of each round."""
    seconds = slowest(measured["page_lock"]["seconds_by_rank"])
    gib = measured["engine"]["source_bytes"] / 2**30
    per_gib = statistics.median(seconds) / gib if seconds else None
    return {**measured["page_lock"], "seconds": seconds, "seconds_per_gib": per_gib}


def show(report: Mapping[str, Any], *, wide: bool = False) -> None:
    """Prints the tables, or with ``wide`` all of them in one, what could not run, and what page-locking cost."""
    out, engine, nvme = console(), report["engine"], report["nvme"]
    say_first(out, report["hardware"]["accelerator"])
    say(out, hardware_line(report["hardware"], report["ranks"]))
    say(
        out,
        f"{engine['parameters']:,} parameters ({report['layers']} layers of {report['hidden']}), "
        f"{plural(len(engine['sub_group_elements']), 'sub-group')} a rank, {report['optimizer']}"
        + ("" if nvme is None else f"; {swapped(nvme, engine)}"),
    )
    rows = [{**one, "name": _name(one)} for one in report["measurements"]]
    if rows and wide:
        whole = make_table("steps and iterations", one_table(_STEPS, _ITERATIONS, _MEMORY), [rows])
        console(WIDE, at_least=WIDE).print(whole)
    elif rows:
        out.print(make_table("optimizer steps", _STEPS, [rows]))
        out.print(make_table("whole iterations", _ITERATIONS, [rows]))
        out.print(make_table("memory", _MEMORY, [rows]))
    if report.get("peers"):
        show_peers(out, report["peers"])
    say(out, "")
    for sentence in reasons(report["not_run"], 1):
        say(out, sentence)
    locking = report["page_lock"]
    if locking["seconds"]:
        what = "the masters" if nvme is None else "the swap buffers"
        say(
            out,
            f"page-locking {what} ({engine['source_bytes'] / 2**30:.2f} GiB a rank) when attached: "
            f"{statistics.median(locking['seconds']):.3f} s, {locking['seconds_per_gib']:.3f} s per GiB",
        )
    if not rows:
        return
    steps = max(len(one["step_seconds"]) for one in report["measurements"])  # fewer, under a limit
    say(out, _NOTE.format(steps=plural(steps, "step")))


def swapped(nvme: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Where the optimizer's state is."""
    count, of = engine["swapped_sub_groups"], len(engine["sub_group_elements"])
    part, how = "all" if count == of else f"{count} of {of}", ", pipelined" if nvme["pipelined"] else ""
    return f"the state of {part} swapped to {file_system_name(nvme['file_system'])}{how}"


def _name(one: Mapping[str, Any]) -> str:
    uses = f" ({one['selected']})" if one["variant"] in ("default", "configured") else ""
    return f"{one['variant']}{uses}"
