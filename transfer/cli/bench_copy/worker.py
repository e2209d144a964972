"""The worker of ``h2d bench``: every variant copies the same values in turn, round by round."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from accelerators import Accelerator

from ...accelerator_choice import AcceleratorChoice
from ...config_file import resolve_config
from ...nvme.mounts import file_system
from ...nvme.swapped_tensor import SwappedTensor
from ..measuring.copies import Case, Variant, refusal
from ..measuring.hardware import describe
from ..measuring.progress import progress
from ..measuring.ranks import Ranks
from .variants import NVME_SWAPPED, file_variants, memory_variants, swap_out_for_reading


def measure(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Measures every variant for each size and dtype.

    Args:
        options: ``elements``, ``dtypes``, ``strategies`` and ``file_strategies`` (lists), ``rounds``,
            ``accelerator`` (a registered name or None), ``config`` (a YAML file with the strategies'
            sections, or None) and ``nvme`` (a directory for files, or None).
        ranks: Those that copy at the same time.

    Returns:
        ``hardware``, ``nvme`` (what files were read from, and how), ``measurements`` and ``not_run``: variants
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
            what = {"elements": elements, "dtype": dtype}
            measurements += [{**what, **one} for one in measured]
            not_run += [{**what, "variant": name, "reason": reason} for name, reason in refused]
    nvme = None
    if options["nvme"] is not None:
        section: Any = resolve_config(options["config"]).section(NVME_SWAPPED)
        kind = file_system(Path(options["nvme"]).expanduser())
        nvme = {"file_system": kind, "threads": section.threads, "request_bytes": section.request_bytes}
    return {"hardware": describe(accelerator), "nvme": nvme, "measurements": measurements, "not_run": not_run}


def _measure_case(
    accelerator: Accelerator,
    elements: int,
    dtype_name: str,
    options: Mapping[str, Any],
    ranks: Ranks,
    advance: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """What was measured, and what was refused with its reason."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    case = Case.of(accelerator, ranks, elements, dtype)
    running: list[Variant] = []
    not_run: list[tuple[str, str]] = []
    with contextlib.ExitStack() as closing:  # every pinned byte goes back before the next size begins
        config = resolve_config(options["config"])
        variants = memory_variants(accelerator, dtype, case.source, config, options["strategies"])
        if options["nvme"] is not None:
            written: list[SwappedTensor] = []

            def write() -> None:
                written.append(swap_out_for_reading(case.source, options["nvme"]))
                closing.callback(written[0].delete)

            reason = refusal(ranks, write)
            if reason is None:
                names = options["file_strategies"]
                variants += file_variants(accelerator, dtype, case.source, written[0], config, names)
            else:
                not_run.append(("everything that reads files", reason))
        for variant in variants:
            closing.callback(variant.transfer.close)
            reason = case.refusal(variant)
            if reason is None:
                running.append(variant)
            else:
                variant.transfer.close()
                not_run.append((variant.name, reason))
        advance(f"{dtype_name} {elements:,}: warmed up")
        for round_number in range(1, options["rounds"] + 1):
            measure_one = case.checked if round_number == options["rounds"] else case.timed
            for variant in running:
                variant.seconds.append(measure_one(variant))
            advance(f"{dtype_name} {elements:,}: round {round_number}")
        return [_result(variant, case) for variant in running], not_run


def _result(variant: Variant, case: Case) -> dict[str, Any]:
    transfer = variant.transfer
    own = {
        "pinned_bytes": transfer.pinned_bytes,
        "page_locked_bytes": variant.source.nbytes if variant.page_lock_seconds is not None else 0,
        "device_bytes": transfer.scratch_bytes,
        "page_lock_seconds": variant.page_lock_seconds,
    }
    right_bits = case.ranks.gather(variant.right_bits)
    return {
        "variant": variant.name,
        "kind": variant.kind,
        "summary": getattr(transfer, "summary", None),
        "from_file": variant.from_file,
        "right_bits": all(right_bits) if variant.right_bits is not None else None,
        "source_bytes": variant.source.nbytes,
        "destination_bytes": case.destination.nbytes,
        **case.ranks.largest(own),
        "seconds_by_rank": case.ranks.gather(variant.seconds),
    }
