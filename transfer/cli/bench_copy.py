"""The worker of ``h2d bench``: every scheme copies the same values in turn, round by round."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ..accelerator_choice import AcceleratorChoice
from ..config_file import resolve_config
from ..errors import TransferError
from ..interface import HostToDeviceTransfer
from ..registry import get_strategy
from . import bits
from .baselines import make_baselines
from .hardware import describe
from .progress import progress
from .ranks import Ranks


@dataclass
class _Scheme:
    """One way to copy, and what was measured of it on this rank."""

    name: str
    kind: str  # "baseline" or "strategy"
    transfer: HostToDeviceTransfer
    source: Tensor
    page_lock_seconds: float | None = None  # None: `prepare` page-locked nothing
    seconds: list[float] = field(default_factory=list)
    right_bits: bool = True


@dataclass(frozen=True)
class _Case:
    """One size and dtype: the values, where they go, and what must be there afterwards."""

    accelerator: Accelerator
    ranks: Ranks
    source: Tensor
    destination: Tensor
    expected: Tensor

    def timed(self, scheme: _Scheme) -> float:
        """Seconds of one copy, which begins on every rank at once."""
        self.accelerator.synchronize()
        self.ranks.barrier()
        started = time.perf_counter()
        scheme.transfer.copy(self.destination, scheme.source)
        self.accelerator.synchronize()
        return time.perf_counter() - started

    def checked(self, scheme: _Scheme) -> float:
        """As ``timed``; the destination holds something else before, and is compared afterwards."""
        bits.poison(self.destination)
        seconds = self.timed(scheme)
        scheme.right_bits &= bits.same_bits(self.destination, self.expected)
        return seconds


def measure(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Measures every scheme for each size and dtype.

    Args:
        options: ``elements``, ``dtypes`` and ``strategies`` (lists), ``rounds``, ``accelerator`` (a
            registered name or None) and ``config`` (a YAML file with the strategies' sections, or None).
        ranks: Those that copy at the same time.

    Returns:
        ``hardware``, ``measurements`` and ``not_run``: schemes that cannot run here, and why.

    Raises:
        TransferError: The accelerator or the configuration is refused.
    """
    accelerator = AcceleratorChoice(options["accelerator"]).resolve()
    cases = list(itertools.product(options["dtypes"], options["elements"]))
    measurements: list[dict[str, Any]] = []
    not_run: list[dict[str, Any]] = []
    with progress(len(cases) * (options["rounds"] + 1), visible=ranks.rank == 0) as advance:
        for dtype, elements in cases:
            measured, refused = _measure_case(accelerator, elements, dtype, options, ranks, advance)
            measurements += measured
            not_run += refused
    return {"hardware": describe(accelerator), "measurements": measurements, "not_run": not_run}


def _measure_case(
    accelerator: Accelerator,
    elements: int,
    dtype_name: str,
    options: Mapping[str, Any],
    ranks: Ranks,
    advance: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    dtype: torch.dtype = getattr(torch, dtype_name)
    source = bits.source_values(elements)
    destination = accelerator.device_empty(elements, dtype=dtype)
    case = _Case(accelerator, ranks, source, destination, source.to(dtype))
    what = {"elements": elements, "dtype": dtype_name}
    running: list[_Scheme] = []
    not_run: list[dict[str, Any]] = []
    with contextlib.ExitStack() as closing:  # every pinned byte goes back before the next size begins
        for scheme in _schemes(accelerator, dtype, source, options):
            closing.callback(scheme.transfer.close)
            prepare, copy = functools.partial(_prepare, case, scheme), functools.partial(case.checked, scheme)
            reason = _obstacle(ranks, prepare) or _obstacle(ranks, copy)
            if reason is None:
                running.append(scheme)
            else:
                scheme.transfer.close()
                not_run.append({**what, "scheme": scheme.name, "reason": reason})
        advance(f"{dtype_name} {elements:,}: warmed up")
        for round_number in range(1, options["rounds"] + 1):
            measure_one = case.checked if round_number == options["rounds"] else case.timed
            for scheme in running:
                scheme.seconds.append(measure_one(scheme))
            advance(f"{dtype_name} {elements:,}: round {round_number}")
        return [{**what, **_result(scheme, case)} for scheme in running], not_run


def _schemes(accelerator: Accelerator, dtype: torch.dtype, source: Tensor, options: Mapping[str, Any]) -> list[_Scheme]:
    config = resolve_config(options["config"])
    baselines = make_baselines(accelerator, dtype).items()
    # Without a fallback: what cannot run is listed as such, and never measured under another's name.
    strategies = [
        (name, get_strategy(name)(config.section(name), accelerator, fallback=False)) for name in options["strategies"]
    ]
    return [_Scheme(name, "baseline", transfer, source) for name, transfer in baselines] + [
        _Scheme(name, "strategy", transfer, source) for name, transfer in strategies
    ]


def _obstacle(ranks: Ranks, attempt: Callable[[], object]) -> str | None:
    """Why an attempt was refused on some rank, or None. All ranks get the same answer, and so go on together."""
    try:
        attempt()
        reason = None
    except TransferError as error:
        reason = str(error)
    return next(filter(None, ranks.gather(reason)), None)


def _prepare(case: _Case, scheme: _Scheme) -> None:
    """Prepares a scheme; one that page-locks in place gets a source of its own.

    The others are to copy from ordinary memory.
    """
    if scheme.kind == "baseline":
        scheme.transfer.prepare(scheme.source)
        return
    own = case.source.clone()
    started = time.perf_counter()
    scheme.transfer.prepare(own)
    seconds = time.perf_counter() - started
    if case.accelerator.is_pinned(own):
        scheme.source, scheme.page_lock_seconds = own, seconds


def _result(scheme: _Scheme, case: _Case) -> dict[str, Any]:
    transfer = scheme.transfer
    own = {
        "seconds": scheme.seconds,
        "right_bits": scheme.right_bits,
        "pinned_bytes": transfer.pinned_bytes,
        "page_locked_bytes": scheme.source.nbytes if scheme.page_lock_seconds is not None else 0,
        "device_bytes": transfer.scratch_bytes,
        "page_lock_seconds": scheme.page_lock_seconds,
    }
    every = case.ranks.gather(own)
    largest = {
        key: max((one[key] for one in every if one[key] is not None), default=None)
        for key in ("pinned_bytes", "page_locked_bytes", "device_bytes", "page_lock_seconds")
    }
    return {
        "scheme": scheme.name,
        "kind": scheme.kind,
        "right_bits": all(one["right_bits"] for one in every),
        "source_bytes": scheme.source.nbytes,
        "destination_bytes": case.destination.nbytes,
        **largest,
        "seconds_by_rank": [one["seconds"] for one in every],
    }
