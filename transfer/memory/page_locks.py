"""Host storages page-locked in place: each once in the process, whoever asks, and never longer than it lives.

An owner is any object that can be told from others. What an owner holds is known here alone, so that an
interrupt at any point leaves nothing that nobody would give back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref

import torch
from torch import Tensor

from accelerators import Accelerator

#: Registrations that one call refuses are tried again in so many pieces.
_PIECES = (1, 4, 16, 64)
#: Host pages are multiples of this many bytes; pieces meet at such an address.
_PAGE_BYTES = 4096


class PageLock:
    """One storage, registered with one accelerator. Made by ``page_lock``, shared by all who ask.

    Attributes:
        address: Where the storage is.
        num_bytes: Its size.
        owners: Who holds it; the last to leave unregisters it.
    """

    def __init__(self, accelerator: Accelerator, storage: torch.UntypedStorage) -> None:
        self._accelerator = accelerator
        self._storage = weakref.ref(storage)
        self._process = os.getpid()
        self.address = storage.data_ptr()
        self.num_bytes = storage.nbytes()
        self.owners: set[object] = set()
        self._pieces: list[tuple[int, int]] = []  # address and bytes of each registration
        self._uncertain: set[tuple[int, int]] = set()  # those of which an interrupt left open whether they are made
        self._whole = False  # whether they cover the storage

    @property
    def is_current(self) -> bool:
        """Whether the storage lives, is where it was when it was registered, and still is registered."""
        storage = self._storage()
        return (
            self._whole
            and self._process == os.getpid()
            and storage is not None
            and storage.data_ptr() == self.address
            and storage.nbytes() == self.num_bytes
        )

    @property
    def held_bytes(self) -> int:
        """Bytes that are registered now: of the storage, or what of it could not be given back."""
        if self._process != os.getpid():
            return 0
        return self.num_bytes if self.is_current else sum(num_bytes for _, num_bytes in tuple(self._pieces))

    def covers(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of this storage, which is registered where it is now."""
        return self._storage() is tensor.untyped_storage() and self.is_current

    def cuts(self, tensor: Tensor) -> list[int]:
        """Addresses inside a contiguous view at which a registration ends and the next begins.

        A copy that spans two registrations fails, or is slow, so chunks end there.
        """
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        return sorted(piece for piece, _ in self._pieces if begin < piece < end)

    def register(self) -> None:
        """Page-locks the storage.

        Raises:
            Exception: What the accelerator raised, or a ``RuntimeError`` where it answers False. Nothing
                is registered then, but for ``held_bytes`` that could not be given back.
        """
        tries = [number for number in _PIECES if number == 1 or self.num_bytes > number * _PAGE_BYTES]
        for number in tries[:-1]:
            with contextlib.suppress(Exception):
                self._register(number)
                return
        self._register(tries[-1])

    def _register(self, number: int) -> None:
        try:
            for begin, end in self._plan(number):
                self._register_piece((begin, end - begin))
            self._whole = True
        except BaseException:
            self.unregister()
            raise

    def _register_piece(self, piece: tuple[int, int]) -> None:
        # Written down before: an interrupt arrives when the long call returns, and so after the registration.
        self._pieces.append(piece)
        try:
            if not self._accelerator.register_host_memory(*piece):
                raise RuntimeError(f"{self._accelerator.name} cannot page-lock existing memory")
        except Exception:
            self._pieces.remove(piece)  # by the protocol, nothing has changed then
            raise
        except BaseException:
            self._uncertain.add(piece)
            raise

    def unregister(self) -> None:
        """Gives the storage back. The caller has waited for every copy that reads it. Twice is fine.

        Raises:
            Exception: What the accelerator raised; what it did not give back is tried again next time.
        """
        self._whole = False
        while self._pieces and self._process == os.getpid():
            try:
                piece = self._pieces.pop()  # first, so that being entered again asks for each once
            except IndexError:  # a finalizer in another thread was quicker
                return
            try:
                self._accelerator.unregister_host_memory(piece[0])
            except Exception:
                if piece in self._uncertain:  # it never was registered, or no longer is
                    continue
                self._pieces.append(piece)
                raise
            except BaseException:
                self._uncertain.add(piece)
                self._pieces.append(piece)
                raise

    def _plan(self, number: int) -> list[tuple[int, int]]:
        """Begin and end of ``number`` pieces that cover the storage."""
        alignment = self._accelerator.capabilities.register_alignment_bytes
        page = max(_PAGE_BYTES, alignment)
        begin, end = self.address - self.address % alignment, self.address + self.num_bytes
        bounds = (begin + (end - begin) * index // number for index in range(1, number))
        edges = sorted({begin, end, *(bound for each in bounds if begin < (bound := each - each % page))})
        return list(itertools.pairwise(edges))


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
    """As ``page_lock``, for a storage that somebody in this process has page-locked already; else None."""
    lock = _locks.get(_key(accelerator, tensor))
    if lock is None or not lock.covers(tensor):
        return None
    if owner not in lock.owners:
        with _guard:  # against the last owner leaving
            if not lock.is_current:
                return None
            lock.owners.add(owner)
    return lock


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
    """Locks whose storage has moved or was freed since: their addresses may be somebody else's now."""
    return [lock for lock in tuple(_locks.values()) if not lock.is_current]


def give_back(lock: PageLock) -> None:
    """Unregisters a stale lock, whoever holds it.

    Raises:
        Exception: As ``PageLock.unregister``.
    """
    with _guard:
        lock.unregister()
        _forget(lock)


def locked_bytes() -> int:
    """Bytes that are page-locked in this process, each storage counted once."""
    return sum(lock.held_bytes for lock in tuple(_locks.values()))


def _key(accelerator: Accelerator, tensor: Tensor) -> tuple[int, int]:
    return id(accelerator), tensor.untyped_storage()._cdata


def _forget(lock: PageLock) -> None:
    for key, value in tuple(_locks.items()):
        if value is lock:
            _locks.pop(key, None)


def _storage_died(key: tuple[int, int], lock: PageLock) -> None:
    with contextlib.suppress(BaseException):  # a finalizer has nobody to tell; `stale` finds it, and it is tried again
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
