"""One range of host memory that is registered with one accelerator, and its one state."""

from __future__ import annotations

import enum
import os
import sys
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from accelerators import Accelerator

from . import own_memory


class State(enum.Enum):
    """What is known about a registration."""

    UNCERTAIN = "it is being made or undone, or an interrupt has left that open"
    HELD = "it is registered"
    LEAVING = "undoing it has failed, and is tried again"
    GONE = "it is not registered"


class PageLock:
    """One range of host memory, registered with one accelerator. Made by ``page_lock`` alone.

    Attributes:
        accelerator: It is registered with this one.
        address: Where the memory is.
        num_bytes: Its size.
        state: Changed under the guard.
        owners: What holds it, and the keys of the storages that it does so for; the last one to leave unregisters it.
        devices: The indices of the devices that have read it.
        memory: What keeps it mapped, if it is of our own.
    """

    def __init__(self, accelerator: Accelerator, storage: torch.UntypedStorage) -> None:
        self.accelerator = accelerator
        self.address = storage.data_ptr()
        self.num_bytes = storage.nbytes()
        self.begin = self.address - self.address % accelerator.capabilities.register_alignment_bytes
        self.state = State.UNCERTAIN
        self.owners: dict[Hashable, set[int]] = {}
        self.devices: set[int | None] = set()
        self.memory = own_memory.mapping(self.address)
        self._process = os.getpid()
        self._storages: dict[int, _Known] = {}

    @property
    def is_current(self) -> bool:
        """Whether it is registered, and a storage over the memory lives where it was."""
        return self.state is State.HELD and any(known.is_in_place for known in tuple(self._storages.values()))

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is registered, and this storage has joined and is where it was then."""
        known = self._storages.get(storage._cdata)
        return (  # in one frame: every copy asks
            known is not None
            and self.state is State.HELD
            and known.reference() is storage
            and storage.data_ptr() == known.address
            and storage.nbytes() == known.num_bytes
        )

    @property
    def storages(self) -> tuple[int, ...]:
        """Keys of the storages over the memory that live, wherever they are."""
        return tuple(self._storages)

    def join(self, storage: torch.UntypedStorage, died: Callable[[PageLock, int], object]) -> None:
        """Adds a storage over the memory.

        Args:
            storage: The storage.
            died: Called with its key when it dies, by torch, in the middle of anything and before the memory is freed.
                Not called in a fork's child, nor while the interpreter ends.
        """
        key, this = storage._cdata, weakref.ref(self)

        def forget(_reference: object) -> None:
            lock = this()
            if lock is not None and lock._process == os.getpid() and not sys.is_finalizing():
                lock._storages.pop(key, None)
                for keys in tuple(lock.owners.values()):
                    keys.discard(key)
                died(lock, key)

        self._storages[key] = _Known(weakref.ref(storage, forget), storage.data_ptr(), storage.nbytes())


@dataclass(frozen=True)
class _Known:
    """A storage, and where it was when it joined."""

    reference: weakref.ref[torch.UntypedStorage]
    address: int
    num_bytes: int

    @property
    def is_in_place(self) -> bool:
        storage = self.reference()
        return storage is not None and storage.data_ptr() == self.address and storage.nbytes() == self.num_bytes
