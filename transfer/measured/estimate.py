"""Which strategy a machine profile expects to be fastest. Pure functions.

`h2d tune` has timed each strategy at a few sizes. Between two sizes, seconds are interpolated on a straight line, which
is exact for a fixed cost and a rate. Beyond the largest size the last line is extended, and does not fall. Below the
smallest size, the smallest size's seconds are used, which is too many, but for every strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .profile import MachineProfile, StrategyTimes

#: What `h2d tune` measures and `strategy: measured` chooses from, the first of equals.
CANDIDATES = ("pinned_direct", "pinned_staged", "pageable")
#: Fields of a strategy's configuration on which its speed depends.
_SETTINGS = ("chunk_elements", "buffers", "mapped")


class Choice(NamedTuple):
    """The fastest strategy, and one sentence that quotes what every candidate was expected to cost."""

    strategy: str
    reason: str


def fastest(
    profile: MachineProfile,
    candidates: Mapping[str, Any],
    elements: int,
    source_dtype: torch.dtype,
    destination_dtype: torch.dtype,
    *,
    waits: bool,
) -> Choice | None:
    """The candidate that blocks the caller for the shortest time; of equals, the first.

    * A caller that waits at once is blocked for the whole copy.
    * A caller that waits after an update of as many elements on the host is blocked for ``submit`` and for what is
      left of the copy after the update: ``host + max(0, total - host - update)``. Without a measured optimizer,
      ``update`` is 0. This leaves out that no update hides the last copy of a step.

    A strategy whose configuration was not measured has the times of the first one that was, and the reason says so.
    Takes about ten microseconds for sizes seen before.

    Args:
        profile: Of this machine.
        candidates: Each strategy's name and its configuration, which must be hashable.
        elements: Of the copy.
        source_dtype: On the host.
        destination_dtype: On the device.
        waits: Whether the caller waits at once, as in ``copy``.

    Returns:
        None where the profile has no times of any candidate, or none for dtypes of these sizes.
    """
    return _fastest(profile, tuple(candidates.items()), elements, source_dtype, destination_dtype, waits)


def settings_of(config: Any) -> dict[str, int]:
    """The part of a strategy's configuration on which its speed depends."""
    return {name: value for name in _SETTINGS if (value := getattr(config, name, None)) is not None}


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds for ``size``, from pairs of rising size and seconds; the module's docstring says how."""
    if size <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    pairs = list(pairwise(points))
    (left, below), (right, above) = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
    return max(below + (size - left) * (above - below) / (right - left), above if size > right else 0.0)


def format_seconds(seconds: float) -> str:
    """With three digits, in a unit that fits: ``18.7 ms``."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.2f} s"


@lru_cache(maxsize=1024)
def _fastest(
    profile: MachineProfile,
    candidates: tuple[tuple[str, Any], ...],
    elements: int,
    source_dtype: torch.dtype,
    destination_dtype: torch.dtype,
    waits: bool,
) -> Choice | None:
    measured = profile.measured
    if source_dtype.itemsize != measured.source_dtype.itemsize:
        return None
    if destination_dtype.itemsize != measured.destination_dtype.itemsize:
        return None
    update = 0.0
    if profile.optimizer is not None:
        update = interpolated([(one.elements, one.seconds) for one in profile.optimizer.updates], elements)
    seen: dict[str, float] = {}
    notes = []
    for name, config in candidates:
        own = [entry for entry in profile.copies if entry.strategy == name]
        if not own:
            notes.append(f"; not {name}: {profile.not_measured.get(name, 'it was not measured').rstrip('.')}")
            continue
        settings = settings_of(config)
        found = next((entry for entry in own if entry.settings == settings), own[0])
        if found.settings != settings:
            notes.append(f"; {name} was measured with {_listed(found.settings.items())}")
        seen[name] = _waited(found, elements, update, waits)
    if not seen:
        return None
    order = sorted(seen, key=seen.__getitem__)  # stable: of equals the first stays in front
    expected = ", ".join(f"{name} {format_seconds(seen[name])}" for name in order)
    what = "until the values are there" if waits else "of waiting"
    if not waits and profile.optimizer is not None:
        what += f", with {format_seconds(update)} of host updates to hide behind"
    return Choice(order[0], f"For {elements} elements the machine profile expects {expected} {what}{''.join(notes)}.")


def _waited(measured: StrategyTimes, elements: int, update: float, waits: bool) -> float:
    def seconds(field: str) -> float:
        return interpolated([(one.elements, getattr(one, field)) for one in measured.times], elements)

    if waits:
        return seconds("copy_seconds")
    host = seconds("submit_seconds")
    return host + max(0.0, seconds("total_seconds") - host - update)


def _listed(settings: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings) or "no settings"
