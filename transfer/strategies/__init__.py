"""Every way bytes move, one file each. Adding one is adding a file, and a line in ``registry``."""

from __future__ import annotations

from .nvme_swapped import NvmeSwappedTransfer
from .nvme_swapped_config import NvmeSwappedConfig
from .pageable import PageableTransfer
from .pinned_direct import PinnedDirectConfig, PinnedDirectTransfer
from .pinned_staged import PinnedStagedConfig, PinnedStagedTransfer

__all__ = [
    "NvmeSwappedConfig",
    "NvmeSwappedTransfer",
    "PageableTransfer",
    "PinnedDirectConfig",
    "PinnedDirectTransfer",
    "PinnedStagedConfig",
    "PinnedStagedTransfer",
]
