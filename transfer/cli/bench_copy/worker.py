"""The worker of ``h2d bench``: every variant copies the same values in turn, round by round."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...accelerator_choice import AcceleratorChoice
from ...config_file import resolve_config
from ...nvme.mounts import file_system
from ...nvme.swapped_tensor import SwappedTensor
from ..measuring.copies import Case, Variant, refusal
from ..measuring.hardware import describe
from ..measuring.progress import progress
from ..measuring.ranks import Ranks
from .variants import NVME_SWAPPED, file_variants, memory_variants, swap_out_for_reading

Entries = list[dict[str, Any]]


def measure(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Measures every variant for each size and dtype: a worker for ``ranks.launch``, with the command's options.

    Returns:
        ``hardware``, ``nvme`` (what files were read from, and how), ``measurements`` and ``not_run`` (with reasons).
    """
    accelerator = AcceleratorChoice(options["accelerator"]).resolve()
    cases = list(itertools.product(dict.fromkeys(options["dtypes"]), dict.fromkeys(options["elements"])))
    measurements: Entries = []
    not_run: Entries = []
    with progress(len(cases) * (options["rounds"] + 1), visible=ranks.rank == 0) as advance:
        for dtype, elements in cases:
            case = Case.of(accelerator, ranks, elements, getattr(torch, dtype))
            measured, refused = _measure(case, options, advance)
            measurements += [{"elements": elements, "dtype": dtype, **one} for one in measured]
            not_run += [{"elements": elements, "dtype": dtype, **one} for one in refused]
    nvme = None
    if options["nvme"] is not None:
        section: Any = resolve_config(options["config"]).section(NVME_SWAPPED)
        kind = file_system(Path(options["nvme"]).expanduser())
        nvme = {"file_system": kind, "threads": section.threads, "request_bytes": section.request_bytes}
    return {"hardware": describe(accelerator), "nvme": nvme, "measurements": measurements, "not_run": not_run}


def _measure(case: Case, options: Mapping[str, Any], advance: Callable[[str], None]) -> tuple[Entries, Entries]:
    """What was measured of one case, and what was refused."""
    running: list[Variant] = []
    not_run: Entries = []
    with contextlib.ExitStack() as closing:  # every pinned byte goes back before the next size begins
        config, accelerator, dtype = resolve_config(options["config"]), case.accelerator, case.destination.dtype
        variants = list(memory_variants(accelerator, dtype, case.source, config, options["strategies"]))
        if options["nvme"] is not None:
            written: list[SwappedTensor] = []

            def write() -> None:
                written.append(swap_out_for_reading(case.source, options["nvme"]))
                closing.callback(written[0].delete)

            reason = refusal(case.ranks, write)
            if reason is None:
                names = options["file_strategies"]
                variants += file_variants(accelerator, dtype, case.source, written[0], config, names)
            else:
                not_run.append({"variant": "everything that reads files", "reason": reason})
        for variant in variants:
            closing.callback(variant.transfer.close)
            reason = case.refusal(variant)
            if reason is None:
                running.append(variant)
            else:
                variant.transfer.close()
                not_run.append({"variant": variant.name, "reason": reason})
        advance(f"{case}: warmed up")
        for number in range(1, options["rounds"] + 1):
            measure_one = case.checked if number == options["rounds"] else case.timed
            for variant in running:
                variant.seconds.append(measure_one(variant))
            advance(f"{case}: round {number}")
        return [_result(variant, case) for variant in running], not_run


def _result(variant: Variant, case: Case) -> dict[str, Any]:
    transfer = variant.transfer
    own = {
        "pinned_bytes": transfer.pinned_bytes - transfer.page_locked_bytes,  # the source is no extra memory
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
