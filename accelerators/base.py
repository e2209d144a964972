"""The smallest accelerator, to be extended: device memory, and copies that block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from .protocol import Capabilities

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class BaseAccelerator(ABC):
    """An ``Accelerator`` with a default for all but two methods: nothing is pinned, and every copy blocks.

    Write ``name``, ``on_device`` and ``device_empty``, and it copies with the strategy ``pageable``. Then add what your
    driver can do, and say so in ``capabilities``: ``Stream``, ``Event``, ``current_stream``, ``stream`` and
    ``synchronize`` for queues; ``pin_empty``, ``is_pinned`` and ``unpin_memory`` for pinned memory;
    ``register_host_memory`` and ``unregister_host_memory`` for page-locking in place; and an ``enqueue_copy`` that does
    not block. ``Accelerator`` says what each method promises, ``accelerators.testing.AcceleratorConformance`` tests it.

    An accelerator need not be a subclass: whatever has the protocol is one.
    """

    name: str
    capabilities: Capabilities = Capabilities(
        streams=False,
        events=False,
        pins_host_memory=False,
        registers_host_memory=False,
        copies_asynchronously=False,
    )
    Event: Callable[[], Any] | None = None
    Stream: Callable[[], Any] | None = None

    def __repr__(self) -> str:
        can = [name.replace("_", " ") for name, value in vars(self.capabilities).items() if value is True]
        return f"<{type(self).__name__} {self.name!r}: {', '.join(can) or 'copies that block'}>"

    @abstractmethod
    def on_device(self, tensor: Tensor) -> bool:
        """Whether the tensor lives in this accelerator's memory."""

    @abstractmethod
    def device_empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the current device."""

    def on_host(self, tensor: Tensor) -> bool:
        """Whether the tensor lives in host memory."""
        return tensor.device.type == "cpu" and not self.on_device(tensor)

    def unavailable_reason(self) -> str | None:
        """Why this accelerator cannot be used here: it can."""
        return None

    def current_stream(self, device_index: int | None = None) -> Any:
        """The current stream: there is none."""
        return None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which ``stream`` is current: it changes nothing."""
        return nullcontext()

    def synchronize(self, device_index: int | None = None) -> None:
        """Blocks until all work on the device is done: it is, where every copy blocks."""

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """Ordinary memory: this accelerator pins none, and ``is_pinned`` says so."""
        import torch

        return torch.empty(size, dtype=dtype, device=device)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the device can read this host tensor directly: it can read none."""
        return False

    def unpin_memory(self, tensor: Tensor) -> bool | None:
        """Gives pinned memory back: there is none."""
        return False

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Pins memory in place: False, as this accelerator cannot."""
        return False

    def unregister_host_memory(self, address: int) -> None:
        """Undoes ``register_host_memory``: there is nothing to undo."""

    def enqueue_copy(self, destination: Tensor, source: Tensor) -> None:
        """``destination.copy_(source)``; blocks as torch does."""
        import torch

        with torch.no_grad():
            destination.copy_(source)
