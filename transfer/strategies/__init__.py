"""Every way bytes move, one file each. Adding one is adding a file and a line here."""

from __future__ import annotations

from ..registry import register_strategy
from .nvme_swapped import NvmeSwappedTransfer
from .nvme_swapped_config import NvmeSwappedConfig
from .pageable import PageableTransfer
from .pinned_direct import PinnedDirectConfig, PinnedDirectTransfer
from .pinned_staged import PinnedStagedConfig, PinnedStagedTransfer

register_strategy("nvme_swapped", NvmeSwappedTransfer)
register_strategy("pageable", PageableTransfer)
register_strategy("pinned_direct", PinnedDirectTransfer)
register_strategy("pinned_staged", PinnedStagedTransfer)

__all__ = [
    "NvmeSwappedConfig",
    "NvmeSwappedTransfer",
    "PageableTransfer",
    "PinnedDirectConfig",
    "PinnedDirectTransfer",
    "PinnedStagedConfig",
    "PinnedStagedTransfer",
]
