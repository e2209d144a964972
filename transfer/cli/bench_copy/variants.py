"""What ``h2d bench`` compares: every baseline and strategy, from host memory and from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ...config import TransferConfig
from ...errors import StrategyUnavailableError
from ...interface import HostToDeviceTransfer
from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of
from ...nvme.open_file import NOT_DIRECT, O_DIRECT, opened
from ...nvme.swapped_tensor import SwappedTensor
from ...nvme.writing import swap_out
from ...registry import get_strategy
from ..measuring.baselines import make_baselines
from ..measuring.raw_io import read_block
from .file_baselines import make_file_baselines

NVME_SWAPPED = "nvme_swapped"
#: Names of rows, and what of the section ``nvme_swapped`` is set for them.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    NVME_SWAPPED: {},
    "nvme_swapped, cast on the host": {"cast": "host"},
    "nvme_swapped, no checksums": {"checksums": False},
}


@dataclass
class Scheme:
    """One way to copy, and what was measured of it on this rank."""

    name: str
    kind: str  # "baseline" or "strategy"
    transfer: HostToDeviceTransfer
    source: Tensor | SwappedTensor
    page_lock_seconds: float | None = None  # None: `prepare` page-locked nothing
    seconds: list[float] = field(default_factory=list)
    right_bits: bool | None = True  # None: nothing is copied that could be compared

    @property
    def from_file(self) -> bool:
        return isinstance(self.source, SwappedTensor)


def reads_files(name: str) -> bool:
    """Whether a strategy, or a variant of one, takes its values from a file."""
    return name in VARIANTS or get_strategy(name).reads_swapped


def with_variants(names: list[str]) -> list[str]:
    """The names, with all variants where ``nvme_swapped`` is among them."""
    return list(dict.fromkeys([*names, *(VARIANTS if NVME_SWAPPED in names else ())]))


def memory_schemes(
    accelerator: Accelerator, dtype: torch.dtype, source: Tensor, config: TransferConfig, names: list[str]
) -> list[Scheme]:
    """Every baseline, and these strategies, which copy from host memory."""
    schemes = [
        Scheme(name, "baseline", transfer, source) for name, transfer in make_baselines(accelerator, dtype).items()
    ]
    # Without a fallback: what cannot run is listed as such, and never measured under another's name.
    return schemes + [
        Scheme(name, "strategy", get_strategy(name)(config.section(name), accelerator, fallback=False), source)
        for name in names
    ]


def file_schemes(
    accelerator: Accelerator,
    dtype: torch.dtype,
    source: Tensor,
    swapped: SwappedTensor,
    config: TransferConfig,
    names: list[str],
) -> list[Scheme]:
    """What reads the file, or copies from the memory that DeepSpeed reads it into; and these strategies."""
    section: Any = config.section(NVME_SWAPPED)
    schemes = []
    for name, baseline in make_file_baselines(accelerator, dtype, section.threads, section.request_bytes).items():
        right_bits = True if getattr(baseline, "copies", True) else None
        from_here = swapped if baseline.reads_swapped else source
        schemes.append(Scheme(name, "baseline", baseline, from_here, right_bits=right_bits))
    for name in names:
        changed, strategy = VARIANTS.get(name, {}), NVME_SWAPPED if name in VARIANTS else name
        chosen = config.section(strategy).model_copy(update=dict(changed))
        schemes.append(Scheme(name, "strategy", get_strategy(strategy)(chosen, accelerator, fallback=False), swapped))
    return schemes


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
            read_block(descriptor, buffer_of(aligned_empty(ALIGNMENT_BYTES)), swapped.offset_bytes)
    except OSError as error:
        if error.errno in NOT_DIRECT:
            return False
        raise
    return bool(O_DIRECT)
