"""What ``h2d bench`` makes of raw seconds: figures for its JSON, and tables of 80 columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...stats import format_bytes
from ..measuring.names import DEEPSPEED, LINK
from ..measuring.quantities import format_count
from ..measuring.report import (
    WIDE,
    Column,
    console,
    figures,
    file_system_name,
    hardware_line,
    legend,
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
from .file_baselines import DEEPSPEED_FROM_NVME, RAW_READ

Measurement = Mapping[str, Any]


@dataclass(frozen=True)
class _Row:
    """One measurement, its seconds for each round, and those of every variant of the same size and dtype."""

    one: Measurement
    seconds: Sequence[float]
    beside: Mapping[str, Sequence[float]]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def rate(self, what: str) -> float:
        """GB/s of these bytes."""
        return float(self.one[what] / self.median / 1e9)

    def share_of(self, name: str) -> float | None:
        return median_ratio(self.beside.get(name), self.seconds)

    def share_of_raw_read(self) -> float | None:
        """Of the faster of the readers."""
        readers = [seconds for name, seconds in self.beside.items() if name.startswith(RAW_READ)]
        return median_ratio(min(readers, key=statistics.median, default=None), self.seconds)

    def page_lock_seconds_per_gib(self) -> float | None:
        seconds = self.one["page_lock_seconds"]
        return None if seconds is None else float(seconds * 2**30 / self.one["source_bytes"])


_NAME = Column("variant", "variant")
_TIMES = (
    _NAME,
    Column("median\nms", "median_seconds", number(".4g", scale=1e3), lambda row: row.median),
    Column("spread\n%", "spread_percent", number(".0f"), lambda row: spread_percent(row.seconds)),
    Column("GB/s", "gigabytes_per_second", number(".3g"), lambda row: row.rate("destination_bytes")),
    Column("of the\nlink", "share_of_link", percent, lambda row: row.share_of(LINK)),
    Column("times\nDeep-\nSpeed", "times_deepspeed", times, lambda row: row.share_of(DEEPSPEED)),
    Column("bits", "right_bits", verdict),
)
_MEMORY = (
    _NAME,
    Column("pinned\nMiB", "pinned_bytes", mebibytes),
    Column("locked\nMiB", "page_locked_bytes", mebibytes),
    Column("s to lock\na GiB", "page_lock_seconds_per_gib", number(".3f"), _Row.page_lock_seconds_per_gib),
    Column("device\nMiB", "device_bytes", mebibytes),
)
_FROM_FILE = (
    _NAME,
    Column("file\nGB/s", "read_gigabytes_per_second", number(".3g"), lambda row: row.rate("source_bytes")),
    Column("of the\nraw read", "share_of_raw_read", percent, _Row.share_of_raw_read),
    Column("times DS\nfrom NVMe", "times_deepspeed_from_nvme", times, lambda row: row.share_of(DEEPSPEED_FROM_NVME)),
)

_NOTE = (
    "Medians of {rounds}, in each of which every variant copies once; ratios are medians of the rounds' ratios. "
    "Spread: the interquartile range, in percent of the median. GB/s: destination bytes of one rank. pinned, device: "
    "memory that the variant needs in addition; locked: the source's own memory, page-locked in place, once. With "
    "several ranks each time is that of the slowest."
)
_FILE_NOTE = (
    "file GB/s: bytes of the file. of the raw read: of the faster reader. times DS from NVMe: DeepSpeed from NVMe. "
    "Raw reads bring nothing to the device, so there are no bits to compare."
)


def with_figures(measurements: Sequence[Measurement]) -> Iterator[dict[str, Any]]:
    """Each measurement with ``seconds`` (the slowest rank's, for each round) and ``figures``."""
    for together in by_case(measurements).values():
        seconds = {one["variant"]: slowest(one["seconds_by_rank"]) for one in together}
        for one in together:
            own = seconds[one["variant"]]
            columns = (*_TIMES, *_MEMORY, *(_FROM_FILE if one["from_file"] else ()))
            yield {**one, "seconds": own, "figures": figures(columns, _Row(one, own, seconds))}


def by_case(entries: Sequence[Measurement]) -> dict[tuple[str, int], list[Measurement]]:
    """Entries of the same dtype and size together, in the order in which they came."""
    cases: dict[tuple[str, int], list[Measurement]] = {}
    for entry in entries:
        cases.setdefault((entry["dtype"], entry["elements"]), []).append(entry)
    return cases


def show(report: Mapping[str, Any], *, wide: bool = False) -> None:
    """Prints tables for each size and dtype, and what could not run; ``wide``: one table for each, with all columns."""
    out, nvme = console(), report["nvme"]
    say_first(out, report["hardware"]["accelerator"])
    say(out, hardware_line(report["hardware"], report["ranks"]))
    if nvme is not None:
        say(out, files_line(nvme))
    cases = by_case(report["measurements"])
    for (dtype, elements), measurements in cases.items():
        groups = [
            [one for one in measurements if (one["kind"], one["from_file"]) == (kind, from_file)]
            for from_file in (False, True)
            for kind in ("baseline", "strategy")
        ]
        title = f"{format_count(elements)} elements, float32 on the host to {dtype} on the device"
        if wide:
            columns = one_table(_TIMES, _MEMORY, _FROM_FILE if any(groups[2:]) else ())
            console(WIDE, at_least=WIDE).print(make_table(title, columns, groups))
            continue
        out.print(make_table(title, _TIMES, groups))
        out.print(make_table("memory", _MEMORY, groups))
        if any(groups[2:]):
            out.print(make_table("from files", _FROM_FILE, groups[2:]))
    say(out, "")
    for sentence in reasons(report["not_run"], len(cases)):
        say(out, sentence)
    say(out, _NOTE.format(rounds=plural(report["rounds"], "round")))
    if nvme is not None:
        say(out, _FILE_NOTE)
    say(out, "")
    out.print(legend({one["variant"]: one["summary"] for one in report["measurements"] if one["summary"]}))


def files_line(nvme: Mapping[str, Any]) -> str:
    """Where the files are, and how the raw reads read them."""
    how = f"by {plural(nvme['threads'], 'thread')}, at most {format_bytes(nvme['request_bytes'])} at a time"
    return f"Files on {file_system_name(nvme['file_system'])}; read with O_DIRECT {how}"
