"""NVIDIA GPUs, and AMD's through ROCm, which calls itself cuda."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from .deepspeed_adapter import DeepSpeedAdapter
from .protocol import Capabilities

#: CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, of the CUDA driver API.
_HOST_POINTER_ATTRIBUTE = 91


class CudaAccelerator(DeepSpeedAdapter):
    """DeepSpeed's CUDA accelerator, with a clean refusal of host memory that cannot be registered."""

    def unavailable_reason(self) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"CUDA is not available: this torch ({torch.__version__}) is built without it."
        if not torch.cuda.is_available():
            return f"CUDA is not available: torch {torch.__version__} finds no usable GPU or driver."
        return None

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, maps_host_memory=_host_pointers_work())

    def device_view(self, tensor: Tensor) -> Tensor:
        """The same pinned host memory as a tensor on the device that it was registered with."""
        with torch._C.DisableTorchFunction():  # or a default device would make a copy there
            flat = torch.as_tensor(_DeviceMemory(tensor.data_ptr(), tensor.numel() * tensor.element_size()))
        return flat.view(tensor.dtype).view(tensor.shape)

    @functools.cached_property
    def _devices(self) -> int:
        return torch.cuda.device_count()

    def is_current_stream_capturing(self, device_index: int | None = None) -> bool:
        here = device_index is None or self._asks_capturing is None or self._devices == 1
        if here or device_index == torch.cuda.current_device():
            return super().is_current_stream_capturing()
        with torch.cuda.device(device_index):
            return super().is_current_stream_capturing()

    def is_pinned(self, tensor: Tensor) -> bool:
        # Under DS_PIN_MEMORY_BACKEND=native, DeepSpeed says True for memory that it could page-lock but
        # not register, which the device does not read directly. The runtime knows.
        of_the_runtime = getattr(self._deepspeed, "_torch_is_pinned", None)
        return super().is_pinned(tensor) if of_the_runtime is None else bool(of_the_runtime(tensor))

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        with _leaving_no_error():
            return super().register_host_memory(address, num_bytes)

    def unregister_host_memory(self, address: int) -> None:
        with _leaving_no_error():
            super().unregister_host_memory(address)


class _DeviceMemory:
    """Bytes at an address, as libraries hand device memory to each other."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _host_pointers_work() -> bool:
    """Whether every device reads registered host memory at the host's own address."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_device()  # starts the driver
        value = ctypes.c_int(0)
        asked = (
            driver.cuDeviceGetAttribute(ctypes.byref(value), _HOST_POINTER_ATTRIBUTE, index) == 0 and value.value == 1
            for index in range(torch.cuda.device_count())
        )
        return all(asked)
    return False


@contextlib.contextmanager
def _leaving_no_error() -> Iterator[None]:
    """Clears CUDA's last error where the block raises.

    A refused cudaHostRegister stays behind as the thread's last error, and the next, unrelated kernel launch would
    report it (seen on an H200): the launch here takes the report.
    """
    try:
        yield
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)
        raise
