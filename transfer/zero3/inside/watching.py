"""Modes of torch that hand copies to a transfer while a function of DeepSpeed's runs, in its thread.

Each hands on exactly the calls that it is for. Every other call, and every call of a form that was not read in
DeepSpeed's source, runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accelerators.overlap import memory_problem

from ...interface import HostToDeviceTransfer


class WatchingCopies(TorchFunctionMode):
    """Hands ``destination.copy_(source)`` of known pairs to ``copy``.

    A pair is known by where it is, its dtypes and its sizes.

    Args:
        pairs: The destination and the source of each, by a key.
        copy: Gets the key, the destination and the source.

    Attributes:
        missing: The keys of those that were not copied so far.
    """

    def __init__(
        self, pairs: Mapping[int, tuple[Tensor, Tensor]], copy: Callable[[int, Tensor, Tensor], object]
    ) -> None:
        super().__init__()
        self.missing = {key for key, (destination, _) in pairs.items() if destination.numel()}
        self._known = {_place(pairs[key][0]): (key, _place(pairs[key][1])) for key in self.missing}
        self._copy = copy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and len(args) == 2 and not kwargs and all(map(_is_plain, args)):
            destination, source = args
            key, known_source = self._known.get(_place(destination), (None, None))
            if key is not None and known_source == _place(source):
                self._copy(key, destination, source)
                self.missing.discard(key)
                return destination
        return func(*args, **(kwargs or {}))


class WatchingMoves(TorchFunctionMode):
    """Makes ``source.to(device)`` by a transfer, where it waits and the source is pageable memory of the host.

    Where the source is pinned, the link's rate is reached already, and where it is not waited for, DeepSpeed says when
    it is.

    Args:
        transfer: Makes the copies.
    """

    def __init__(self, transfer: HostToDeviceTransfer) -> None:
        super().__init__()
        self._transfer = transfer
        self._device = transfer.accelerator.device_empty(1, dtype=torch.uint8).device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and args and _is_plain(args[0]):
            dtype = self._dtype_on_device(args[0], *args[1:], **kwargs)
            moved = None if dtype is None else self._move(args[0], dtype)
            if moved is not None:
                return moved
        return func(*args, **kwargs)

    def _dtype_on_device(
        self, source: Tensor, device: Any = None, *others: Any, dtype: Any = None, **kwargs: Any
    ) -> torch.dtype | None:
        """The dtype that the result has on the device, and None for every other call."""
        if others or kwargs.pop("non_blocking", False) or kwargs or not isinstance(device, str | torch.device):
            return None
        wanted = torch.device(device)
        is_ours = wanted.type == self._device.type and wanted.index in (None, self._device.index)
        return source.dtype if is_ours and dtype is None else dtype if is_ours else None

    def _move(self, source: Tensor, dtype: torch.dtype) -> Tensor | None:
        accelerator = self._transfer.accelerator
        source = source.detach()  # nothing in these functions is differentiated
        if not source.numel() or not source.is_contiguous():
            return None
        if not accelerator.on_host(source) or accelerator.is_pinned(source):
            return None
        destination = accelerator.device_empty(*source.shape, dtype=dtype)
        if not self._transfer.is_host_to_device(destination, source):
            return None
        self._transfer.copy(destination, source)
        return destination


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and type(tensor) is Tensor and memory_problem(tensor) is None


def _place(tensor: Tensor) -> tuple[Any, int, torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
