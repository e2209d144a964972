"""NVIDIA GPUs, and AMD's through ROCm, which calls itself cuda."""

from __future__ import annotations

import torch
from torch import Tensor

from .deepspeed_adapter import DeepSpeedAdapter


class CudaAccelerator(DeepSpeedAdapter):
    """DeepSpeed's CUDA accelerator, with a clean refusal of host memory that cannot be registered."""

    def unavailable_reason(self) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"CUDA is not available: this torch ({torch.__version__}) is built without it."
        if not torch.cuda.is_available():
            return f"CUDA is not available: torch {torch.__version__} finds no usable GPU or driver."
        return None

    def is_pinned(self, tensor: Tensor) -> bool:
        # Under DS_PIN_MEMORY_BACKEND=native, DeepSpeed says True for memory that it could page-lock but
        # not register, which the device does not read directly. The runtime knows.
        of_the_runtime = getattr(self._deepspeed, "_torch_is_pinned", None)
        return super().is_pinned(tensor) if of_the_runtime is None else bool(of_the_runtime(tensor))

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        try:
            return super().register_host_memory(address, num_bytes)
        except RuntimeError:
            # A refused cudaHostRegister stays behind as the thread's last error, and the next,
            # unrelated kernel launch would report it (seen on an H200); let ours be that launch.
            _take_last_error()
            raise


def _take_last_error() -> None:
    try:
        torch.empty(1, device="cuda").fill_(0)
    except RuntimeError:
        return
