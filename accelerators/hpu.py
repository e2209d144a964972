"""Intel Gaudi."""

from __future__ import annotations

import torch
from torch import Tensor

from .deepspeed_adapter import DeepSpeedAdapter

#: Before ``torch.accelerator``, a tensor is asked whether it is pinned for CUDA unless a device is named; later, for
#: whatever accelerator is there, and naming one is deprecated.
_NAMES_THE_DEVICE = not hasattr(torch, "accelerator")


class HpuAccelerator(DeepSpeedAdapter):
    """DeepSpeed's HPU accelerator, which pins for ``hpu`` and asks without naming it."""

    def is_pinned(self, tensor: Tensor) -> bool:
        return super().is_pinned(tensor) or (_NAMES_THE_DEVICE and tensor.is_pinned("hpu"))
