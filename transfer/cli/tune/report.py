"""What `h2d tune` tells of a profile: the measurements, what would be chosen, and which chunks are best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...measured.cost_model import choose, expected_seconds, shown
from ...measured.profile import Drive, MachineProfile
from ...nvme.mounts import MEMORY_FILE_SYSTEMS
from .measure import DESTINATION, SOURCE

if TYPE_CHECKING:
    from rich.console import Console

#: Elements of the copies for which a choice is shown.
TYPICAL_ELEMENTS = (2**20, 2**24, 2**28)
#: A larger chunk must gain this much: each doubling doubles the memory that is pinned.
_WORTH_DOUBLING = 0.02


class Ring(NamedTuple):
    """What the model reads of the configurations of ``pinned_staged`` and ``pinned_direct``."""

    chunk_elements: int
    buffers: int = 2
    mapped: bool = False


def best_rings(profile: MachineProfile) -> dict[str, Ring]:
    """For each strategy with chunks that can run here, the ring that is expected to be fastest for a large copy.

    The smallest of those that are within 2% of each other.
    """
    best: dict[str, Ring] = {}
    for name in ("pinned_staged", "pinned_direct"):
        found, cheapest = None, float("inf")
        for entry in profile.host_cast:
            ring = Ring(entry.chunk_elements)
            cost = expected_seconds(profile, name, ring, TYPICAL_ELEMENTS[-1], SOURCE, DESTINATION)
            if cost.total_seconds < cheapest * (1 - _WORTH_DOUBLING):
                found, cheapest = ring, cost.total_seconds
        if found is not None:
            best[name] = found
    return best


def choices(profile: MachineProfile) -> list[dict[str, Any]]:
    """What would be chosen for copies of typical sizes, with the rings that are best here, and why."""
    rings = best_rings(profile)
    candidates: dict[str, Any] = {"pageable": None, "pinned_staged": Ring(2**24), "pinned_direct": Ring(2**22), **rings}
    candidates["pinned_direct"] = candidates["pinned_direct"]._replace(mapped=True)  # the default, where it can be
    rows = []
    for elements in TYPICAL_ELEMENTS:
        for deferred in (False, True):
            name, reason = choose(profile, candidates, elements, SOURCE, DESTINATION, deferred=deferred)
            completion = "deferred" if deferred else "immediate"
            rows.append({"elements": elements, "completion": completion, "strategy": name, "reason": reason})
    return rows


def config_yaml(profile: MachineProfile) -> str:
    """A configuration file that uses the profile and the rings that are best here."""
    lines = ["transfer:", "  strategy: measured"]
    for name, ring in best_rings(profile).items():
        lines.append(f"  {name}: {{chunk_elements: {ring.chunk_elements}, buffers: {ring.buffers}}}")
    if profile.drive is not None:
        best = profile.drive.best_read
        lines.append(f"  nvme_swapped: {{threads: {best.threads}, request_bytes: {best.block_bytes}}}")
    return "\n".join(lines)


def print_report(console: Console, profile: MachineProfile) -> None:
    """Two tables and a configuration."""
    from rich.table import Table

    machine, measured = profile.machine, profile.measured
    title = (
        f"{machine.device}, {machine.cpu}, {machine.cores} cores, torch {measured.torch_version}; ranks at once: "
        f"{measured.ranks}, host threads of each: {measured.threads_per_rank}"
    )
    table = Table("what", "of", "measured", title=title, title_justify="left")
    for row in _measurements(profile):
        table.add_row(*row)
    console.print(table)
    table = Table(
        "elements", "completion", "strategy", "why", title="What `strategy: measured` takes with the rings below"
    )
    for choice in choices(profile):
        table.add_row(_power(choice["elements"]), *(choice[key] for key in ("completion", "strategy", "reason")))
    console.print(table)
    if profile.drive is not None:
        _print_drive(console, profile.drive)
    console.print("A configuration for this machine:\n")
    console.print(config_yaml(profile), highlight=False, soft_wrap=True)


def _print_drive(console: Console, drive: Drive) -> None:
    from rich.table import Table

    threads = list(dict.fromkeys(entry.threads for entry in drive.read))
    rates = {
        (entry.block_bytes, entry.threads): [entry.bytes_per_second, write.bytes_per_second]
        for entry, write in zip(drive.read, drive.write, strict=True)
    }
    how = (
        "past the page cache"
        if drive.direct
        else "through the page cache, as O_DIRECT is refused: not the drive's own rates"
    )
    memory = ", which is memory and no drive" if drive.file_system in MEMORY_FILE_SYSTEMS else ""
    table = Table(
        "blocks of",
        *(f"{count} thread{'s' * (count > 1)}" for count in threads),
        title=f"GB/s of each rank, read / written on {drive.file_system}{memory}, {how}",
        title_justify="left",
    )
    for block_bytes in dict.fromkeys(entry.block_bytes for entry in drive.read):
        cells = (" / ".join(f"{rate / 1e9:.3g}" for rate in rates[block_bytes, count]) for count in threads)
        table.add_row(_size(block_bytes), *cells)
    console.print(table)
    for what, best in (("read", drive.best_read), ("written", drive.best_write)):
        rate = f"{best.bytes_per_second / 1e9:.3g} GB/s"
        console.print(f"Best {what}: {best.threads} threads, blocks of {_size(best.block_bytes)}, {rate}")


def _measurements(profile: MachineProfile) -> list[tuple[str, str, str]]:
    rows = [
        ("wire", _size(entry.chunk_bytes), f"{shown(entry.seconds)}, {_rate(entry.chunk_bytes / entry.seconds)}B/s")
        for entry in profile.wire
    ]
    rows += [
        (
            "cast on the host",
            f"{_power(entry.chunk_elements)} elements",
            f"{_rate(entry.elements_per_second)} elements/s",
        )
        for entry in profile.host_cast
    ]
    rows += [
        ("pageable copy", f"{_power(entry.elements)} elements", shown(entry.seconds)) for entry in profile.pageable
    ]
    for what, of, seconds in (
        ("fixed cost of a staged chunk", "", profile.staged_chunk_seconds),
        ("fixed cost of a direct chunk", "", profile.direct_chunk_seconds),
        ("latency of a chunk", "", profile.latency_seconds),
        ("page-locking in place", "1 GiB", profile.page_lock_seconds_per_gib),
    ):
        rows.append((what, of, "-" if seconds is None else shown(seconds)))
    for what, rate in (
        ("cast on the device", profile.device_cast_elements_per_second),
        ("read and cast by the device", profile.mapped_elements_per_second),
        ("Adam on the host", profile.host_update_elements_per_second),
    ):
        rows.append((what, "", "-" if rate is None else f"{_rate(rate)} elements/s"))
    return rows + [(f"no {name.replace('_', ' ')}", "", reason) for name, reason in profile.lacks.items()]


def _power(elements: int) -> str:
    exponent = elements.bit_length() - 1
    return f"2^{exponent}" if elements == 1 << exponent else str(elements)


def _size(num_bytes: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} bytes"


def _rate(value: float) -> str:
    return f"{value / 1e9:.3g} G"
