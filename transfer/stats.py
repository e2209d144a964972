"""Counts of what each strategy has done, read through ``HostToDeviceTransfer.stats``."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StrategyStats:
    """Counts of one strategy since it was made. Two of them can be added and subtracted.

    Attributes:
        copies: Copies that this strategy made.
        bytes: Bytes of their destinations.
        pieces: Chunks of them.
        wait_seconds: Seconds for which the host was blocked, by waits for the device and by copies that block.
        cast_seconds: Seconds in which the host cast into staging buffers.
        passed_on: Copies that this strategy was to make, and that another one made and counted.
        read_seconds: Seconds for which the host waited for a file to be read.
    """

    copies: int = 0
    bytes: int = 0
    pieces: int = 0
    wait_seconds: float = 0.0
    cast_seconds: float = 0.0
    passed_on: int = 0
    read_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the host was blocked or cast: what the copies cost it."""
        return self.wait_seconds + self.cast_seconds + self.read_seconds

    @property
    def gigabytes_per_second(self) -> float | None:
        """10^9 bytes of the destinations for each second of ``busy_seconds``; None before the host was busy.

        Copies that ran behind other work took longer than that, and cost nothing.
        """
        return self.bytes / self.busy_seconds / 1e9 if self.busy_seconds > 0 else None

    def __str__(self) -> str:
        rate = self.gigabytes_per_second
        said = f"{self.copies} cop{'y' if self.copies == 1 else 'ies'}, {format_bytes(self.bytes)}"
        if rate is not None:
            said += f", host busy for {self.busy_seconds:.3g} s: {rate:.3g} GB/s"
        return said + (f", {self.passed_on} passed on" if self.passed_on else "")

    def __repr__(self) -> str:
        return f"<StrategyStats: {self}>"

    def __add__(self, other: StrategyStats) -> StrategyStats:
        return StrategyStats(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __sub__(self, other: StrategyStats) -> StrategyStats:
        return StrategyStats(*(getattr(self, name) - getattr(other, name) for name in _NAMES))


_NAMES = tuple(each.name for each in fields(StrategyStats))


class Counters:
    """The counts of one strategy while it works. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, int | float] = dict.fromkeys(_NAMES, 0)
        self._lock = threading.RLock()  # a signal handler may copy in the middle of an addition

    def add(self, **counts: int | float) -> None:
        """Adds to the counts.

        Args:
            **counts: Fields of ``StrategyStats``.
        """
        with self._lock:
            for name, more in counts.items():
                self._counts[name] += more

    @property
    def total(self) -> StrategyStats:
        """The counts up to now."""
        with self._lock:
            return StrategyStats(**self._counts)  # type: ignore[arg-type]  # whole numbers stay whole


def format_bytes(count: int) -> str:
    """Bytes in the unit that fits: ``1.5 GiB``."""
    power = min(4, max(0, (count.bit_length() - 1) // 10))
    return f"{count / 2 ** (10 * power):.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def summary(transfer: Any) -> str:
    """What a ``HostToDeviceTransfer`` has done and what it holds, in a line."""
    held = ((transfer.pinned_bytes, "pinned"), (transfer.scratch_bytes, "of the device"))
    parts = [f"{format_bytes(count)} {what}" for count, what in held if count]
    return f"{sum(transfer.stats().values(), StrategyStats())}, holds {' and '.join(parts) or 'nothing'}"


def merged(*several: dict[str, StrategyStats]) -> dict[str, StrategyStats]:
    """The counts of several transfers, added up for each strategy."""
    total: dict[str, StrategyStats] = {}
    for stats in several:
        for name, counts in stats.items():
            total[name] = total.get(name, StrategyStats()) + counts
    return total
