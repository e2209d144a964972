"""Host memory that files can be read into, and written from, without a copy in the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

#: O_DIRECT wants addresses, offsets and lengths in units of the drive's logical block: 512 bytes, or 4096 on
#: newer drives, so this fits all.
ALIGNMENT_BYTES = 4096


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not less than ``number``."""
    return -(-number // unit) * unit


def round_down(number: int, unit: int) -> int:
    """The largest multiple of ``unit`` that is not more than ``number``."""
    return number // unit * unit


def aligned(memory: Tensor, num_bytes: int) -> Tensor:
    """The first ``num_bytes`` of a flat uint8 tensor that begin at an aligned address."""
    return memory.narrow(0, -memory.data_ptr() % ALIGNMENT_BYTES, num_bytes)


def aligned_empty(num_bytes: int) -> Tensor:
    """Uninitialised, flat, aligned uint8 host memory, whatever the mode and the default device."""
    with torch.inference_mode(False):
        return aligned(torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device="cpu"), num_bytes)


def buffer_of(memory: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 host tensor, for system calls. The tensor must outlive them."""
    view: memoryview = memory.numpy().data
    return view
