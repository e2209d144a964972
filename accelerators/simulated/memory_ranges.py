"""Sets of memory: what is pinned, registered, or on the device."""

from __future__ import annotations

import threading
import weakref

from torch import Tensor

from ..overlap import AddressRanges, address, memory_problem, span_bytes


class MemoryRanges:
    """A set of address ranges, each with a size in bytes. Thread-safe."""

    def __init__(self) -> None:
        self._ranges: AddressRanges[bool] = AddressRanges()
        self._lock = threading.RLock()

    @property
    def total_bytes(self) -> int:
        return self._ranges.total_bytes

    def add(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._ranges.add(address, num_bytes, True)

    def remove(self, address: int) -> bool:
        """Whether a range began at exactly this address; it is gone now."""
        with self._lock:
            return self._ranges.remove(address)

    def size_at(self, address: int) -> int | None:
        """The size of the range that begins at exactly this address, or None."""
        return self._ranges.size_at(address)

    def overlaps(self, address: int, num_bytes: int) -> bool:
        """Whether any range shares a byte with the given one."""
        with self._lock:
            return bool(self._ranges.overlapping(address, num_bytes))

    def contain(self, tensor: Tensor) -> bool:
        """Whether every element of ``tensor`` lies in one of the ranges; False without elements or memory."""
        if tensor.numel() == 0 or memory_problem(tensor) is not None:
            return False
        with self._lock:
            return self._ranges.covering(tensor.data_ptr(), span_bytes(tensor)) is not None


class Storages:
    """A set of storages, each for as long as it lives, wherever it moves when it is resized."""

    def __init__(self) -> None:
        self._alive: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Adds the storage under ``tensor``; every view of it belongs to the set then.

        Raises:
            ValueError: It has no memory of its own.
        """
        address(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._alive.add(storage._cdata)
            weakref.finalize(storage, self._alive.discard, storage._cdata).atexit = False

    def contain(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has elements in one of the storages."""
        return tensor.numel() > 0 and memory_problem(tensor) is None and tensor.untyped_storage()._cdata in self._alive
