"""The worker of ``h2d bench``: every scheme copies the same values in turn, round by round."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ...accelerator_choice import AcceleratorChoice
from ...config_file import resolve_config
from ...errors import TransferError
from ...nvme.mounts import file_system
from ...nvme.swapped_tensor import SwappedTensor
from ..measuring import bits
from ..measuring.hardware import describe
from ..measuring.progress import progress
from ..measuring.ranks import Ranks
from .variants import NVME_SWAPPED, Scheme, file_schemes, memory_schemes, swap_out_for_reading


@dataclass(frozen=True)
class _Case:
    """One size and dtype: the values, where they go, and what must be there afterwards."""

    accelerator: Accelerator
    ranks: Ranks
    source: Tensor
    destination: Tensor
    expected: Tensor

    def timed(self, scheme: Scheme) -> float:
        """Seconds of one copy, which begins on every rank at once."""
        self.accelerator.synchronize()
        self.ranks.barrier()
        started = time.perf_counter()
        scheme.transfer.copy(self.destination, scheme.source)
        self.accelerator.synchronize()
        return time.perf_counter() - started

    def checked(self, scheme: Scheme) -> float:
        """As ``timed``; the destination holds something else before, and is compared afterwards."""
        bits.poison(self.destination)
        seconds = self.timed(scheme)
        if scheme.right_bits is not None:
            scheme.right_bits &= bits.same_bits(self.destination, self.expected)
        return seconds


def measure(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Measures every scheme for each size and dtype.

    Args:
        options: ``elements``, ``dtypes``, ``strategies`` and ``file_strategies`` (lists), ``rounds``,
            ``accelerator`` (a registered name or None), ``config`` (a YAML file with the strategies'
            sections, or None) and ``nvme`` (a directory for files, or None).
        ranks: Those that copy at the same time.

    Returns:
        ``hardware``, ``nvme`` (what files were read from, and how), ``measurements`` and ``not_run``: schemes
        that cannot run here, and why.

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
    return {
        "hardware": describe(accelerator),
        "nvme": _describe_files(options),
        "measurements": measurements,
        "not_run": not_run,
    }


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
    running: list[Scheme] = []
    not_run: list[dict[str, Any]] = []
    with contextlib.ExitStack() as closing:  # every pinned byte goes back before the next size begins
        config = resolve_config(options["config"])
        schemes = memory_schemes(accelerator, dtype, source, config, options["strategies"])
        if options["nvme"] is not None:
            swapped, reason = _swapped_out(ranks, source, options["nvme"], closing)
            if swapped is None:
                not_run.append({**what, "scheme": "everything that reads files", "reason": reason})
            else:
                schemes += file_schemes(accelerator, dtype, source, swapped, config, options["file_strategies"])
        for scheme in schemes:
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


def _swapped_out(
    ranks: Ranks, source: Tensor, directory: str, closing: contextlib.ExitStack
) -> tuple[SwappedTensor | None, str | None]:
    """The values in a file of this rank, which ``closing`` deletes; or why some rank has none."""
    written: list[SwappedTensor] = []

    def write() -> None:
        written.append(swap_out_for_reading(source, directory))
        closing.callback(written[0].delete)

    reason = _obstacle(ranks, write)
    return (written[0] if reason is None else None), reason


def _describe_files(options: Mapping[str, Any]) -> dict[str, Any] | None:
    if options["nvme"] is None:
        return None
    section: Any = resolve_config(options["config"]).section(NVME_SWAPPED)
    kind = file_system(Path(options["nvme"]).expanduser())
    return {"file_system": kind, "threads": section.threads, "block_bytes": section.request_bytes}


def _obstacle(ranks: Ranks, attempt: Callable[[], object]) -> str | None:
    """Why an attempt was refused on some rank, or None. All ranks get the same answer, and so go on together."""
    try:
        attempt()
        reason = None
    except TransferError as error:
        reason = str(error)
    return next(filter(None, ranks.gather(reason)), None)


def _prepare(case: _Case, scheme: Scheme) -> None:
    """Prepares a scheme; one that page-locks in place gets a source of its own.

    The others are to copy from ordinary memory.
    """
    if scheme.kind == "baseline":
        source: Any = scheme.source  # baselines that read files size their buffers
        scheme.transfer.prepare(source)
        return
    if scheme.from_file:  # no memory to prepare
        return
    own = case.source.clone()
    started = time.perf_counter()
    scheme.transfer.prepare(own)
    seconds = time.perf_counter() - started
    if case.accelerator.is_pinned(own):
        scheme.source, scheme.page_lock_seconds = own, seconds


def _result(scheme: Scheme, case: _Case) -> dict[str, Any]:
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
        "from_file": scheme.from_file,
        "right_bits": all(one["right_bits"] for one in every) if scheme.right_bits is not None else None,
        "source_bytes": scheme.source.nbytes,
        "destination_bytes": case.destination.nbytes,
        **largest,
        "seconds_by_rank": [one["seconds"] for one in every],
    }
