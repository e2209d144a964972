"""The simulated accelerator as DeepSpeed sees it."""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor

from ..protocol import Accelerator


class SimulatedDeepSpeedAccelerator(CPU_Accelerator):  # type: ignore[misc]  # deepspeed is untyped
    """DeepSpeed's CPU accelerator whose pinning and synchronising go to a simulated one.

    Streams and events stay hidden from DeepSpeed: its own code would call ``record_stream`` on CPU
    tensors, which torch refuses. Its collectives run over gloo, without a compiled shared-memory op.
    """

    def __init__(self, simulated: Accelerator) -> None:
        super().__init__()
        self.h2d_accelerator = simulated

    def synchronize(self, device_index: int | None = None) -> None:
        self.h2d_accelerator.synchronize(device_index)

    def pin_memory(self, tensor: Tensor, *unused: Any, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        pinned = self.h2d_accelerator.pin_empty(tensor.numel(), dtype=tensor.dtype)
        if make_copy:
            pinned.copy_(tensor.reshape(-1))
        return pinned.view(tensor.shape) if match_shape else pinned

    def pin_empty(self, *size: int, dtype: Any, device: str = "cpu") -> Tensor:
        return self.h2d_accelerator.pin_empty(*size, dtype=dtype, device=device)

    def is_pinned(self, tensor: Tensor) -> bool:
        return self.h2d_accelerator.is_pinned(tensor)

    def unpin_memory(self, tensor: Tensor) -> bool | None:
        return self.h2d_accelerator.unpin_memory(tensor)

    def get_op_builder(self, class_name: str) -> Any:
        if class_name in ("ShareMemCommBuilder", "CCLCommBuilder"):
            from deepspeed.ops.op_builder.cpu import NotImplementedBuilder

            return NotImplementedBuilder
        return super().get_op_builder(class_name)
