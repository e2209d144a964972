"""How long a copy takes on a measured machine, and which strategy is cheapest there. Pure functions.

Chunks pass two stages, one behind the other: into a buffer, and out of it. ``pinned_staged`` casts on the
host and then uses the wire; ``pinned_direct`` uses the wire and then casts on the device. After the first
chunk the slower stage sets the pace. Where the device reads mapped host memory there is one stage and
no chunks.

Work on the host is scaled by the bytes it touches where a copy is not the measured fp32 to bf16, because it
is bound by memory. Chunks are taken to be as large as configured, but for the last; copies that share the
machine with nothing but what ``h2d tune`` ran at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import torch

from ..errors import ConfigError
from .pipeline import interpolated, ring_seconds
from .profile import MachineProfile

#: Bytes that the measured casts touch for each element: fp32 read, bf16 written.
_MEASURED_BYTES = 6
_NEEDS = {
    "pageable": (),
    "pinned_staged": ("events", "pins_host_memory"),
    "pinned_direct": ("streams", "events", "pins_host_memory"),
}


class Cost(NamedTuple):
    """What one copy costs.

    Attributes:
        total_seconds: From the call of ``submit`` until the destination holds the values.
        host_seconds: Until ``submit`` returns.
        obstacle: Why the strategy cannot be used or nothing is known of it, as one sentence; both times are
            infinite then.
    """

    total_seconds: float
    host_seconds: float
    obstacle: str | None = None


class Choice(NamedTuple):
    """The cheapest strategy, and one sentence that quotes what every candidate was expected to cost."""

    strategy: str
    reason: str


class Ring(Protocol):
    """What the model reads of a strategy's configuration, unless it is ``pageable``'s."""

    @property
    def chunk_elements(self) -> int: ...
    @property
    def buffers(self) -> int: ...


def choose(
    profile: MachineProfile,
    candidates: Mapping[str, Any] | Iterable[tuple[str, Any]],
    elements: int,
    source_dtype: torch.dtype,
    destination_dtype: torch.dtype,
    *,
    deferred: bool,
    source_pinned: bool = False,
) -> Choice:
    """The candidate that holds the caller up for the shortest time; of equals, the first.

    * Where the caller waits at once, that is the whole copy.
    * Where it waits after the optimizer has updated as many elements on the host, it is the call of ``submit``
      and what is left of the copy after that update: ``host + max(0, total - host - update)``. The last
      copy of a step has no update to hide behind; the others do.

    Takes a few microseconds for sizes seen before.

    Args:
        profile: Of this machine.
        candidates: Each strategy and its configuration, which must be hashable.
        elements: Of the copy.
        source_dtype: On the host.
        destination_dtype: On the device.
        deferred: Whether the wait comes after the next update.
        source_pinned: Whether the device can read the source directly already.

    Raises:
        ConfigError: There are no candidates.
    """
    pairs = tuple(candidates.items() if isinstance(candidates, Mapping) else candidates)
    return _choose(profile, pairs, elements, source_dtype, destination_dtype, deferred, source_pinned)


@lru_cache(maxsize=1024)
def expected_seconds(
    profile: MachineProfile,
    strategy_name: str,
    strategy_config: Any,
    elements: int,
    source_dtype: torch.dtype,
    destination_dtype: torch.dtype,
    source_pinned: bool = False,
) -> Cost:
    """What one copy is expected to cost.

    Args:
        profile: Of this machine.
        strategy_name: ``pageable``, ``pinned_staged`` or ``pinned_direct``.
        strategy_config: Its configuration; a ``Ring`` but for ``pageable``.
        elements: Of the copy.
        source_dtype: On the host.
        destination_dtype: On the device.
        source_pinned: Whether the device can read the source directly already.
    """
    obstacle = _obstacle(profile, strategy_name, source_pinned)
    if obstacle is not None:
        return Cost(float("inf"), float("inf"), obstacle)
    if elements == 0:
        return Cost(0.0, 0.0)
    if strategy_name == "pageable":
        points = [(entry.elements, entry.seconds) for entry in profile.pageable]
        seconds = interpolated(points, elements) * _scale(source_dtype, destination_dtype)
        return Cost(seconds, seconds)
    ring = cast(Ring, strategy_config)
    cost = _staged if strategy_name == "pinned_staged" else _direct
    return cost(profile, ring, elements, source_dtype, destination_dtype)


def seen_seconds(profile: MachineProfile, cost: Cost, elements: int, *, deferred: bool) -> float:
    """How long a copy holds the caller up, as ``choose`` compares it."""
    if not deferred or cost.obstacle is not None:
        return cost.total_seconds
    update = elements / profile.host_update_elements_per_second
    return cost.host_seconds + max(0.0, cost.total_seconds - cost.host_seconds - update)


def shown(seconds: float) -> str:
    """With three digits, in a unit that fits: ``18.7 ms``."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.2f} s"


@lru_cache(maxsize=1024)
def _choose(
    profile: MachineProfile,
    candidates: tuple[tuple[str, Any], ...],
    elements: int,
    source_dtype: torch.dtype,
    destination_dtype: torch.dtype,
    deferred: bool,
    source_pinned: bool,
) -> Choice:
    if not candidates:
        raise ConfigError("there is no strategy to choose from")
    costs = {
        name: expected_seconds(
            profile,
            name,
            config if deferred else _in_chunks(config),
            elements,
            source_dtype,
            destination_dtype,
            source_pinned,
        )
        for name, config in candidates
    }
    seen = {name: seen_seconds(profile, cost, elements, deferred=deferred) for name, cost in costs.items()}
    order = sorted(seen, key=seen.__getitem__)  # stable: of equals the first stays in front
    possible = ", ".join(f"{name} {shown(seen[name])}" for name in order if costs[name].obstacle is None)
    excluded = "".join(
        f"; not {name}: {cost.obstacle.rstrip('.')}" for name, cost in costs.items() if cost.obstacle is not None
    )
    what = "until the values are there"
    if deferred:
        update = shown(elements / profile.host_update_elements_per_second)
        what = f"of waiting, with {update} of host updates to hide behind"
    expected = f"expects {possible} {what}" if possible else "knows no strategy that can run"
    return Choice(order[0], f"For {elements} elements the machine profile {expected}{excluded}.")


def _in_chunks(config: Any) -> Any:
    """A configuration as it works where the caller waits at once: ``pinned_direct`` reads nothing mapped then."""
    mapped = getattr(config, "mapped", False)
    return _Chunks(config.chunk_elements, config.buffers) if mapped else config


class _Chunks(NamedTuple):
    chunk_elements: int
    buffers: int


def _obstacle(profile: MachineProfile, strategy: str, source_pinned: bool) -> str | None:
    if strategy not in _NEEDS:
        return f"`h2d tune` does not measure {strategy}."
    needs = _NEEDS[strategy]
    if strategy == "pinned_direct" and not source_pinned:
        needs = (*needs, "registers_host_memory")
    for capability in needs:
        if capability in profile.lacks:
            return profile.lacks[capability]
    measured = {
        "pageable": True,
        "pinned_staged": profile.wire and profile.host_cast,
        "pinned_direct": profile.wire and profile.device_cast_elements_per_second,
    }
    return None if measured[strategy] else f"The profile lacks the measurements for {strategy}."


def _staged(profile: MachineProfile, ring: Ring, elements: int, source: torch.dtype, destination: torch.dtype) -> Cost:
    casts = [(entry.chunk_elements, entry.chunk_elements / entry.elements_per_second) for entry in profile.host_cast]
    scale, fixed = _scale(source, destination), profile.staged_chunk_seconds or 0.0

    def stages(chunk: int) -> tuple[float, float]:
        return fixed + scale * interpolated(casts, chunk), _wire(profile, chunk * destination.itemsize)

    chunks, rest = divmod(elements, ring.chunk_elements)
    filled, drained = ring_seconds(
        chunks, *stages(ring.chunk_elements), ring.buffers, rest=stages(rest) if rest else None
    )
    return Cost(drained + (profile.latency_seconds or 0.0), filled)


def _direct(profile: MachineProfile, ring: Ring, elements: int, source: torch.dtype, destination: torch.dtype) -> Cost:
    queueing, latency = profile.direct_chunk_seconds or 0.0, profile.latency_seconds or 0.0
    if getattr(ring, "mapped", False) and profile.mapped_elements_per_second and source != destination:
        # Bound by the wire, which the source's bytes cross.
        reading = elements / profile.mapped_elements_per_second * source.itemsize / torch.float32.itemsize
        return Cost(queueing + reading + latency, queueing)
    rate = profile.device_cast_elements_per_second or float("inf")

    def stages(chunk: int) -> tuple[float, float]:
        cast_seconds = 0.0 if source == destination else chunk / rate * _scale(source, destination)
        return _wire(profile, chunk * source.itemsize), cast_seconds

    chunks, rest = divmod(elements, ring.chunk_elements)
    last = stages(rest or ring.chunk_elements)
    _, device = ring_seconds(chunks, *stages(ring.chunk_elements), ring.buffers, rest=last if rest else None)
    host = (chunks + bool(rest)) * queueing
    # The host queues all chunks without waiting for the device. Either may be the one that is behind.
    total = max(queueing + device, host + sum(last))
    return Cost(total + latency, host)


def _wire(profile: MachineProfile, num_bytes: int) -> float:
    return interpolated([(entry.chunk_bytes, entry.seconds) for entry in profile.wire], num_bytes)


def _scale(source: torch.dtype, destination: torch.dtype) -> float:
    return (source.itemsize + destination.itemsize) / _MEASURED_BYTES
