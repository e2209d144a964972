"""How ``h2d bench`` shows its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.text import Text

from ...nvme.mounts import MEMORY_FILE_SYSTEMS
from ..measuring.baselines import SUMMARIES
from ..measuring.quantities import shown
from ..measuring.table import console, hardware_line, legend, make_table, mebibytes, number, verdict
from .figures import by_case
from .file_baselines import FILE_SUMMARIES

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
_FILE_COLUMNS = ("file\nGB/s", "of the\nraw read", "times DS\nfrom NVMe")

_NOTE = (
    "Medians of {rounds} round{s}, in each of which every scheme copies once; ratios are medians of the rounds' "
    "ratios. "
    "Spread: the interquartile range, in percent of the median. GB/s: destination bytes of one rank. pinned, device: "
    "memory that the scheme needs in addition; locked: the source's own memory, page-locked in place. With several "
    "ranks each time is that of the slowest."
)
_FILE_NOTE = (
    "file GB/s: bytes of the file. of the raw read: of the faster reader. times DS from NVMe: DeepSpeed from NVMe. "
    "Raw reads bring nothing to the device, so there are no bits to compare."
)


def show(report: Mapping[str, Any]) -> None:
    """Prints one table for each size and dtype, and what could not run."""
    out = console()
    out.print(Text(hardware_line(report["hardware"], report["ranks"])))
    nvme = report["nvme"]
    if nvme is not None:
        out.print(Text(_files_line(nvme)))
    columns = _COLUMNS if nvme is None else (*_COLUMNS, *_FILE_COLUMNS)
    refused = by_case(report["not_run"])
    for (dtype, elements), measurements in by_case(report["measurements"]).items():
        title = f"{shown(elements)} elements, float32 on the host to {dtype} on the device"
        groups = [
            [_row(one, len(columns)) for one in measurements if (one["kind"], one["from_file"]) == (kind, from_file)]
            for from_file in (False, True)
            for kind in ("baseline", "strategy")
        ]
        out.print(make_table(title, columns, groups))
        for entry in refused.get((dtype, elements), ()):
            out.print(Text(f"not run: {entry['scheme']}: {entry['reason']}"))
        for one in measurements:
            if one["page_lock_seconds"] is not None:
                per_gib = one["figures"]["page_lock_seconds_per_gib"]
                out.print(Text(f"{one['scheme']}: page-locking its source took {per_gib:.3f} s per GiB, once"))
    out.print(Text(_NOTE.format(rounds=report["rounds"], s="s" * (report["rounds"] != 1))))
    if nvme is not None:
        out.print(Text(_FILE_NOTE))
    out.print(legend(_summaries(dict.fromkeys(one["scheme"] for one in report["measurements"]))))


def _files_line(nvme: Mapping[str, Any]) -> str:
    kind = nvme["file_system"] or "an unknown file system"
    memory = ", which is memory: no drive is measured" if kind in MEMORY_FILE_SYSTEMS else ""
    how = f"O_DIRECT by {nvme['threads']} threads, at most {nvme['block_bytes'] / 2**20:.4g} MiB at a time"
    return f"Files on {kind}{memory}; read with {how}"


def _summaries(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What the baselines among these stand for."""
    known = {**SUMMARIES, **FILE_SUMMARIES}
    for name in names:
        summary = known.get(name) or known.get(name.partition(",")[0])  # the number of threads differs
        if summary is not None:
            yield name, summary


def _row(one: Mapping[str, Any], columns: int) -> tuple[str | Text, ...]:
    figures = one["figures"]
    row = (
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
        number(figures.get("read_gigabytes_per_second"), ".3g"),
        number(figures.get("share_of_raw_read"), ".0%"),
        number(figures.get("times_deepspeed_from_nvme"), ".2f", "x"),
    )
    return row[:columns]
