"""Counts of what each strategy has done, read through ``HostToDeviceTransfer.stats``."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields


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


def merged(*several: dict[str, StrategyStats]) -> dict[str, StrategyStats]:
    """The counts of several transfers, added up for each strategy."""
    total: dict[str, StrategyStats] = {}
    for stats in several:
        for name, counts in stats.items():
            total[name] = total.get(name, StrategyStats()) + counts
    return total
