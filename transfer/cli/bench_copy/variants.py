"""What ``h2d bench`` compares: every baseline and strategy, from host memory and from files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ...config import TransferConfig
from ...errors import StrategyUnavailableError
from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of
from ...nvme.open_file import NOT_DIRECT, O_DIRECT, opened
from ...nvme.swapped_tensor import SwappedTensor
from ...nvme.writing import swap_out
from ...registry import get_strategy
from ..measuring.baselines import make_baselines
from ..measuring.copies import Variant
from ..measuring.raw_io import read_request
from .file_baselines import make_file_baselines

NVME_SWAPPED = "nvme_swapped"
#: Variants of ``nvme_swapped``, and what of its section is set for them.
NVME_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    NVME_SWAPPED: {},
    "nvme_swapped, cast on the host": {"cast": "host"},
    "nvme_swapped, no checksums": {"checksums": False},
}


def reads_files(name: str) -> bool:
    """Whether a strategy, or a variant of one, takes its values from a file."""
    return name in NVME_VARIANTS or get_strategy(name).reads_swapped


def with_variants(names: list[str]) -> list[str]:
    """The names, with all variants where ``nvme_swapped`` is among them."""
    return list(dict.fromkeys([*names, *(NVME_VARIANTS if NVME_SWAPPED in names else ())]))


def memory_variants(
    accelerator: Accelerator, dtype: torch.dtype, source: Tensor, config: TransferConfig, names: list[str]
) -> list[Variant]:
    """Every baseline, and these strategies, which copy from host memory."""
    variants = [
        Variant(name, "baseline", transfer, source) for name, transfer in make_baselines(accelerator, dtype).items()
    ]
    # Without a fallback: what cannot run is listed as such, and never measured under another's name.
    return variants + [
        Variant(name, "strategy", get_strategy(name)(config.section(name), accelerator, fallback=False), source)
        for name in names
    ]


def file_variants(
    accelerator: Accelerator,
    dtype: torch.dtype,
    source: Tensor,
    swapped: SwappedTensor,
    config: TransferConfig,
    names: list[str],
) -> list[Variant]:
    """What reads the file, or copies from the memory that DeepSpeed reads it into; and these strategies."""
    section: Any = config.section(NVME_SWAPPED)
    variants = []
    for name, baseline in make_file_baselines(accelerator, dtype, section.threads, section.request_bytes).items():
        right_bits = True if getattr(baseline, "copies", True) else None
        from_here = swapped if baseline.reads_swapped else source
        variants.append(Variant(name, "baseline", baseline, from_here, right_bits=right_bits))
    for name in names:
        changed, strategy = NVME_VARIANTS.get(name, {}), NVME_SWAPPED if name in NVME_VARIANTS else name
        chosen = config.section(strategy).model_copy(update=dict(changed))
        variants.append(Variant(name, "strategy", get_strategy(strategy)(chosen, accelerator, fallback=False), swapped))
    return variants


def swap_out_for_reading(source: Tensor, directory: str) -> SwappedTensor:
    """The source in a file that is read past the page cache.

    Raises:
        SwapError: The file cannot be written.
        StrategyUnavailableError: It can only be read through the page cache, which would be measured then.
    """
    swapped = swap_out(source, directory, "h2d-bench")
    if not _reads_directly(swapped):
        swapped.delete()
        raise StrategyUnavailableError(
            f"The file system at {directory} refuses O_DIRECT: what would be measured is the page cache."
        )
    return swapped


def _reads_directly(swapped: SwappedTensor) -> bool:
    """Whether the file can be read past the page cache; some file systems refuse it only when they read."""
    try:
        with opened(swapped.path, O_DIRECT) as descriptor:
            read_request(descriptor, buffer_of(aligned_empty(ALIGNMENT_BYTES)), swapped.offset_bytes)
    except OSError as error:
        if error.errno in NOT_DIRECT:
            return False
        raise
    return bool(O_DIRECT)
