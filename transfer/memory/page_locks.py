"""Host storages page-locked in place: each once in the process, for all its owners, and no longer than it lives.

An owner is any hashable object. Only this module knows what an owner holds, so that an interrupt at any point loses
no page-lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from accelerators import Accelerator

#: States of a registration. An interrupt leaves open whether it was made or undone.
_FREE, _REGISTERED, _UNCERTAIN, _LEAVING = "free", "registered", "uncertain", "leaving"


class PageLock:
    """One storage, registered with one accelerator. Made by ``page_lock``, shared by all who ask.

    Attributes:
        address: Where the storage is.
        num_bytes: Its size.
        owners: What holds it; the last one to leave unregisters it.
    """

    def __init__(self, accelerator: Accelerator, storage: torch.UntypedStorage) -> None:
        self._accelerator = accelerator
        self._storage = weakref.ref(storage)
        self._process = os.getpid()
        self.address = storage.data_ptr()
        self.num_bytes = storage.nbytes()
        self.owners: set[object] = set()
        self._begin = self.address - self.address % accelerator.capabilities.register_alignment_bytes
        self._length = self.address + self.num_bytes - self._begin
        self._state = _FREE

    @property
    def is_current(self) -> bool:
        """Whether the storage lives, is where it was when it was registered, and still is registered."""
        storage = self._storage()
        return (
            self._state == _REGISTERED
            and self._process == os.getpid()
            and storage is not None
            and storage.data_ptr() == self.address
            and storage.nbytes() == self.num_bytes
        )

    @property
    def held_bytes(self) -> int:
        """Bytes that are registered now: of the storage, or what of it could not be given back."""
        if self._process != os.getpid() or self._state == _FREE:
            return 0
        return self.num_bytes if self.is_current else self._length

    def covers(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of this storage, which is registered where it is now."""
        return self._storage() is tensor.untyped_storage() and self.is_current

    def register(self) -> None:
        """Page-locks the storage.

        Raises:
            Exception: What the accelerator raised, or a ``RuntimeError`` where it answers False. Nothing
                is registered then, but for ``held_bytes`` that could not be given back.
        """
        try:
            # Written down before: an interrupt arrives when the long call returns, and so after the registration.
            self._state = _UNCERTAIN
            if not self._accelerator.register_host_memory(self._begin, self._length):
                raise RuntimeError(f"{self._accelerator.name} cannot page-lock existing memory")
            self._state = _REGISTERED
        except Exception:
            self._state = _FREE  # by the protocol, nothing has changed then
            raise
        except BaseException:
            self.unregister()
            raise

    def unregister(self) -> None:
        """Gives the storage back. The caller has waited for every copy that reads it. Idempotent.

        Raises:
            Exception: What the accelerator raised; what it did not give back is tried again next time.
        """
        state, self._state = self._state, _FREE  # first, so that being entered again asks once
        if state == _FREE or self._process != os.getpid():
            return
        try:
            self._accelerator.unregister_host_memory(self._begin)
        except Exception:
            if state != _UNCERTAIN:  # else it never was registered, or no longer is
                self._state = _LEAVING
                raise
        except BaseException:
            self._state = _UNCERTAIN
            raise


_locks: dict[tuple[int, int], PageLock] = {}
_guard = threading.RLock()


def page_lock(accelerator: Accelerator, tensor: Tensor, owner: object) -> PageLock:
    """Page-locks the whole storage of a host tensor for ``owner``, or joins those who have done so.

    Blocks for about 50 ms a GiB when it is the first. Code that moves the storage or frees its memory by
    other means than dropping it (``resize_``, ``share_memory_``) must let it be given back first.

    Raises:
        Exception: As ``PageLock.register``; ``owner`` does not hold it then.
    """
    with _guard:
        another = joined(accelerator, tensor, owner)
        if another is not None:
            return another
        storage = tensor.untyped_storage()
        key = _key(accelerator, tensor)
        before = _locks.get(key)
        if before is not None:  # resized, or the finalizer below has not run yet
            before.unregister()
        lock = PageLock(accelerator, storage)
        lock.owners.add(owner)
        _locks[key] = lock
        # Takes no lock: it may run in the middle of anything. Not at exit, where copies may be in flight.
        weakref.finalize(storage, _storage_died, key, lock).atexit = False
        try:
            lock.register()
        except BaseException:
            lock.owners.discard(owner)
            if not lock.held_bytes:  # else it is kept, to be given back
                _forget(lock)
            raise
        return lock


def joined(accelerator: Accelerator, tensor: Tensor, owner: object) -> PageLock | None:
    """As ``page_lock``, for a storage that is page-locked in this process already; else None."""
    lock = find(accelerator, tensor)
    if lock is None:
        return None
    if owner not in lock.owners:
        with _guard:  # against the last owner leaving
            if not lock.is_current:
                return None
            lock.owners.add(owner)
    return lock


def find(accelerator: Accelerator, tensor: Tensor) -> PageLock | None:
    """The page-lock that covers a tensor, of any owner, or None."""
    lock = _locks.get(_key(accelerator, tensor))
    return lock if lock is not None and lock.covers(tensor) else None


def owned_by(owner: object) -> list[PageLock]:
    """What ``owner`` holds."""
    return [lock for lock in tuple(_locks.values()) if owner in lock.owners]


def leave(lock: PageLock, owner: object) -> None:
    """Gives up what ``owner`` holds; the last one to leave unregisters. One that holds nothing is fine.

    Raises:
        Exception: As ``PageLock.unregister``; the lock is not left then.
    """
    with _guard:
        if owner in lock.owners and len(lock.owners) == 1:
            lock.unregister()
            _forget(lock)
        lock.owners.discard(owner)


def stale() -> list[PageLock]:
    """Locks whose storage has moved or was freed since: their addresses may belong to other memory now."""
    return [lock for lock in tuple(_locks.values()) if not lock.is_current]


def give_back(lock: PageLock) -> None:
    """Unregisters a stale lock for all its owners.

    Raises:
        Exception: As ``PageLock.unregister``.
    """
    with _guard:
        lock.unregister()
        _forget(lock)


def locked_bytes() -> int:
    """Bytes that are page-locked in this process, each storage counted once."""
    return sum(lock.held_bytes for lock in tuple(_locks.values()))


class OwnedLocks:
    """The page-locks of one owner, as a holding.

    Args:
        settle: Blocks until no copy of the owner's is under way.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self.owner = object()
        self._settle = settle

    @property
    def page_locked_bytes(self) -> int:
        """Bytes that are page-locked for the owner."""
        return sum(lock.held_bytes for lock in owned_by(self.owner))

    pinned_bytes = page_locked_bytes

    def open(self) -> None:
        """Does nothing: the first ``page_lock`` takes the first lock."""

    def close(self) -> None:
        """Leaves all of them, and gives back what failed registrations have left."""
        self._settle()
        for lock in owned_by(self.owner):
            leave(lock, self.owner)
        for lock in stale():
            if not lock.owners:
                give_back(lock)

    def release_stale(self) -> bool:
        """Gives back locks whose addresses may be another tensor's by now; whether there were any."""
        found = stale()
        for lock in found:
            self._settle()
            give_back(lock)
        return bool(found)


class LeavingLock:
    """A holding whose ``close`` makes the owner leave a page-lock."""

    def __init__(self, lock: PageLock, owned: OwnedLocks) -> None:
        self._lock = lock
        self._owned = owned

    def open(self) -> None:
        """Does nothing: the lock is held already."""

    def close(self) -> None:
        """Waits for the owner's copies, and leaves."""
        self._owned._settle()
        leave(self._lock, self._owned.owner)


def _key(accelerator: Accelerator, tensor: Tensor) -> tuple[int, int]:
    return id(accelerator), tensor.untyped_storage()._cdata


def _forget(lock: PageLock) -> None:
    for key, value in tuple(_locks.items()):
        if value is lock:
            _locks.pop(key, None)


def _storage_died(key: tuple[int, int], lock: PageLock) -> None:
    with contextlib.suppress(BaseException):  # a finalizer has no caller: `stale` finds the lock, to be tried again
        lock.unregister()
        if _locks.get(key) is lock:
            _locks.pop(key, None)


def _start_afresh() -> None:
    """In a forked child: another thread may have held the guard, and the registrations are the parent's."""
    global _guard
    _guard = threading.RLock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
