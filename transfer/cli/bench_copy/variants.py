"""What ``h2d bench`` compares: every baseline and strategy, from host memory and from files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ...config import TransferConfig
from ...errors import StrategyUnavailableError
from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of
from ...nvme.open_file import O_DIRECT, opened
from ...nvme.swapped_tensor import SwappedTensor
from ...nvme.writing import swap_out
from ...registry import get_strategy
from ..measuring.baselines import make_baselines
from ..measuring.copies import Variant
from ..measuring.raw_io import goes_past_the_cache, move_all
from .file_baselines import make_file_baselines

NVME_SWAPPED = "nvme_swapped"
#: Variants of ``nvme_swapped``, and what of its section is set for them.
NVME_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    NVME_SWAPPED: {},
    "nvme_swapped, cast on the host": {"cast": "host"},
    "nvme_swapped, no checksums": {"checksums": False},
}


def memory_variants(
    accelerator: Accelerator, dtype: torch.dtype, source: Tensor, config: TransferConfig, names: list[str]
) -> Iterator[Variant]:
    """Every baseline, and these strategies, which copy from host memory."""
    for name, baseline in make_baselines(accelerator, dtype).items():
        yield Variant(name, "baseline", baseline, source)
    for name in names:
        yield Variant(name, "strategy", get_strategy(name)(config.section(name), accelerator), source)


def file_variants(
    accelerator: Accelerator,
    dtype: torch.dtype,
    source: Tensor,
    swapped: SwappedTensor,
    config: TransferConfig,
    names: list[str],
) -> Iterator[Variant]:
    """What reads the file, or copies from the memory that DeepSpeed reads it into; and these strategies."""
    section: Any = config.section(NVME_SWAPPED)
    for name, baseline in make_file_baselines(accelerator, dtype, section.threads, section.request_bytes).items():
        from_here = swapped if baseline.reads_swapped else source
        yield Variant(name, "baseline", baseline, from_here, right_bits=True if baseline.copies else None)
    for name in names:
        strategy = NVME_SWAPPED if name in NVME_VARIANTS else name
        chosen = config.section(strategy).model_copy(update=dict(NVME_VARIANTS.get(name, {})))
        yield Variant(name, "strategy", get_strategy(strategy)(chosen, accelerator), swapped)


def swap_out_for_reading(source: Tensor, directory: str) -> SwappedTensor:
    """The source in a file that is read past the page cache.

    Raises:
        SwapError: The file cannot be written.
        StrategyUnavailableError: It can only be read through the page cache, which would be measured then.
    """
    swapped = swap_out(source, directory, "h2d-bench")

    def read() -> None:
        with opened(swapped.path, O_DIRECT) as descriptor:
            move_all(os.preadv, descriptor, buffer_of(aligned_empty(ALIGNMENT_BYTES)), swapped.offset_bytes)

    if not O_DIRECT or not goes_past_the_cache(read):
        swapped.delete()
        raise StrategyUnavailableError(
            f"The file system at {directory} refuses O_DIRECT: what would be measured is the page cache."
        )
    return swapped
