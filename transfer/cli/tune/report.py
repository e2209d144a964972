"""What `h2d tune` tells of a profile: the measurements, what would be chosen, and which chunks are best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from ...measured.estimate import CANDIDATES, fastest, format_seconds
from ...measured.profile import WORTH_MORE, Drive, DriveRate, MachineProfile, StrategyTimes
from ...registry import get_strategy
from ...stats import format_bytes
from ..measuring.quantities import format_count
from ..measuring.report import WIDE, Column, console, file_system_name, make_table, number, plural, say, say_first

#: Elements of the copies for which a choice is shown.
TYPICAL_ELEMENTS = (2**20, 2**24, 2**28)
_TIMES = {
    "copy_seconds": "`copy`: until the values are there",
    "submit_seconds": "`submit`: for which the host is held",
    "total_seconds": "from `submit` until the values are there",
}


def best_settings(profile: MachineProfile) -> dict[str, dict[str, int]]:
    """For each strategy that can run here, its settings that are fastest for the largest copy that was measured.

    Of those that are within 2% of each other, the ones with the smallest chunks, which pin the least memory.
    """
    best: dict[str, StrategyTimes] = {}
    for name in CANDIDATES:
        own = sorted(
            (entry for entry in profile.copies if entry.strategy == name),
            key=lambda entry: entry.settings.get("chunk_elements", 0),
        )
        for entry in own:
            seconds = entry.times[-1].copy_seconds
            if name not in best or seconds < best[name].times[-1].copy_seconds * (1 - WORTH_MORE):
                best[name] = entry
    return {name: entry.settings for name, entry in best.items()}


def choices(profile: MachineProfile) -> list[dict[str, Any]]:
    """What would be chosen for copies of typical sizes, with the settings that are best here, and why."""
    candidates = {name: get_strategy(name).Config(**settings) for name, settings in best_settings(profile).items()}
    dtypes = profile.measured.source_dtype, profile.measured.destination_dtype
    rows = []
    for elements in TYPICAL_ELEMENTS:
        for completion in ("immediate", "deferred"):
            choice = fastest(profile, candidates, elements, *dtypes, waits=completion == "immediate")
            if choice is not None:
                rows.append({"elements": elements, "completion": completion, **choice._asdict()})
    return rows


def config_yaml(profile: MachineProfile) -> str:
    """A configuration file that uses the profile and the settings that are best here."""
    lines = ["transfer:", "  strategy: measured"]
    for name, settings in best_settings(profile).items():
        ring = {key: settings[key] for key in ("chunk_elements", "buffers") if key in settings}
        if ring:
            lines.append(f"  {name}: {{{', '.join(f'{key}: {value}' for key, value in ring.items())}}}")
    if profile.drive is not None:
        best = profile.drive.best_read
        lines.append(f"  nvme_swapped: {{threads: {best.threads}, request_bytes: {best.request_bytes}}}")
    return "\n".join(lines)


def show(profile: MachineProfile, file: str, *, wide: bool = False) -> None:
    """Prints what was measured, what follows from it, a configuration, and the file's name."""
    out, machine, measured = console(*((WIDE, WIDE) if wide else ())), profile.machine, profile.measured
    say_first(out, machine.accelerator)
    say(
        out,
        f"{machine.device}; {machine.cpu}, {machine.cores} cores; {plural(measured.ranks, 'rank')} with "
        f"{plural(measured.threads_per_rank, 'host thread')}; torch {measured.torch_version}",
    )
    for field, title in _TIMES.items():
        out.print(_copies(profile, field, title))
    say(out, "")
    for name, reason in profile.not_measured.items():
        say(out, f"not measured: {name}: {reason}")
    if profile.optimizer is not None:
        updates = profile.optimizer.updates[-1]
        say(out, f"{profile.optimizer.name}: {updates.elements / updates.seconds / 1e9:.3g} G elements/s")
    if profile.drive is not None:
        _show_drive(out, profile.drive)
    for row in choices(profile):
        say(out, f"{row['completion']}: {row['strategy']}. {row['reason']}")
    out.print(f"\nA configuration for this machine:\n\n{config_yaml(profile)}", soft_wrap=True)
    out.print(f"\nWritten to {file}", soft_wrap=True)


def _copies(profile: MachineProfile, field: str, title: str) -> Any:
    sizes = dict.fromkeys(one.elements for entry in profile.copies for one in entry.times)
    columns = [Column("strategy", "strategy"), Column("chunk", "chunk", lambda chunk: chunk and format_count(chunk))]
    columns += [Column(format_count(elements), str(elements), _seconds) for elements in sizes]
    rows = [
        {
            "strategy": entry.strategy,
            "chunk": entry.settings.get("chunk_elements", ""),
            **{str(one.elements): getattr(one, field) for one in entry.times},
        }
        for entry in profile.copies
    ]
    return make_table(f"{title}, by elements", columns, [rows])


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _show_drive(out: Console, drive: Drive) -> None:
    refused = "through the page cache, as O_DIRECT is refused: not the drive's own rates"
    where = f"on {file_system_name(drive.file_system)}, {'past the page cache' if drive.direct else refused}"
    for what, best, rate in (("read", drive.best_read, _read), ("written", drive.best_write, _written)):
        out.print(_drive_table(f"GB/s of each rank, {what} {where}", drive.rates, rate))
        _say_best(out, f"Best {what}", best, rate(best))
    if drive.mixed is not None and drive.best_mixed is not None:
        title = f"GB/s of each rank, read and written at once {where}: the slower of both"
        out.print(_drive_table(title, drive.mixed, _slower))
        _say_best(out, "Best of both at once", drive.best_mixed, _slower(drive.best_mixed))


def _read(rate: DriveRate) -> float:
    return rate.read_bytes_per_second


def _written(rate: DriveRate) -> float:
    return rate.written_bytes_per_second


def _slower(rate: DriveRate) -> float:
    return min(rate.read_bytes_per_second, rate.written_bytes_per_second)


def _drive_table(title: str, rates: Sequence[DriveRate], value: Callable[[DriveRate], float]) -> Any:
    threads = dict.fromkeys(one.threads for one in rates)
    columns = [Column("requests of", "request_bytes", format_bytes)]
    columns += [Column(plural(count, "thread"), str(count), number(".3g", scale=1e-9)) for count in threads]
    rows: dict[int, dict[str, Any]] = {}
    for rate in rates:
        row = rows.setdefault(rate.request_bytes, {"request_bytes": rate.request_bytes})
        row[str(rate.threads)] = value(rate)
    return make_table(title, columns, [list(rows.values())])


def _say_best(out: Console, what: str, best: DriveRate, rate: float) -> None:
    size = format_bytes(best.request_bytes)
    say(out, f"{what}: {plural(best.threads, 'thread')}, requests of {size}, {rate / 1e9:.3g} GB/s")
