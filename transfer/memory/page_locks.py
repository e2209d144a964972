"""Host memory that is page-locked in place: one registration a range of addresses, for all who hold it.

This module alone knows what is registered and who holds it. A lock is found by address, so another storage over the
same memory joins it. An owner is any hashable object.

Registered memory that is freed is the danger: the next tensor at its address counts as page-locked, and the device
reads the old pages. So a storage that dies takes its lock along. What moves memory under a living storage
(``resize_``, ``share_memory_``) needs ``leave`` first; otherwise the lock is stale until its owner, or another storage
there, comes by. Memory of our own (``own_memory``) stays mapped until then, which is why ZeRO-3's masters lie there.

A finalizer takes no lock that is held: it marks. Whoever lets go of the guard serves the marks. Only where the guard is
free does the finalizer serve them itself, at once, as torch frees the memory next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.overlap import AddressRanges

from ..errors import TransferBusyError
from .marking_guard import MarkingGuard
from .page_lock import PageLock, State


class _Registry:
    """The registrations of one process."""

    def __init__(self) -> None:
        self.guard = MarkingGuard(_leave)
        self.tables: dict[int, AddressRanges[PageLock]] = {}  # by accelerator
        self.by_storage: dict[tuple[int, int], PageLock] = {}
        self.owned: dict[Hashable, dict[PageLock, None]] = {}
        self.unowned: dict[PageLock, None] = {}  # what a failed or interrupted registration has left


class OverBudgetError(Exception):
    """More bytes would be page-locked than allowed; the message says how many are."""


def find(accelerator: Accelerator, tensor: Tensor) -> PageLock | None:
    """The page-lock that covers the whole storage of a tensor, of any owner, or None. Takes no lock."""
    table = _registry.tables.get(id(accelerator))
    if table is None:
        return None
    storage = tensor.untyped_storage()
    lock = table.covering(storage.data_ptr(), storage.nbytes())
    return lock if lock is not None and (lock.has(storage) or lock.is_current) else None


def joined(accelerator: Accelerator, tensor: Tensor, owner: Hashable) -> PageLock | None:
    """As ``page_lock``, for memory that is page-locked in this process already; else None.

    Raises:
        TransferBusyError: As ``page_lock``.
    """
    lock = find(accelerator, tensor)
    if lock is None or tensor.untyped_storage()._cdata in lock.owners.get(owner, ()):
        return lock
    return _registry.guard.alone(_join, accelerator, tensor, owner)


def page_lock(
    accelerator: Accelerator, tensor: Tensor, owner: Hashable, most_bytes: int | None = None
) -> PageLock | None:
    """Page-locks the whole storage of a host tensor for ``owner``, or joins those who have done so.

    Blocks for 50 to 300 ms a GiB when it is the first.

    Args:
        accelerator: Registers host memory.
        tensor: Has elements.
        owner: Any hashable object.
        most_bytes: How many bytes this process may have page-locked in place; None for any number.

    Returns:
        The lock; None where others have pinned the memory already.

    Raises:
        OverBudgetError: ``most_bytes`` would be passed.
        TransferBusyError: This thread is in the middle of a change of page-locks: a signal handler or a finalizer asks.
        Exception: What the accelerator raised, or a ``RuntimeError`` where it answers False. ``owner`` does not hold
            it then, and nothing is registered, but for what could not be given back: ``give_back_stale`` tries again.
    """
    return _registry.guard.alone(_page_lock, accelerator, tensor, owner, most_bytes)


def drop(lock: PageLock, owner: Hashable, storage: torch.UntypedStorage) -> bool:
    """``owner`` needs a lock no more for this storage; whether it needs it for none now, and is to leave."""
    keys = lock.owners.get(owner)
    if keys is None or storage._cdata not in keys:
        return False
    keys.discard(storage._cdata)
    return not keys


def leave(lock: PageLock, owner: Hashable) -> None:
    """Gives up what ``owner`` holds; the last one to leave unregisters. One that holds nothing is fine.

    The caller has waited for the owner's copies. Inside another change of the same thread it is done when that ends.

    Raises:
        Exception: What the accelerator raised; ``owner`` holds it still then, but nothing can be copied from there.
    """
    try:
        _registry.guard.alone(_leave, lock, owner)
    except TransferBusyError:
        leave_later(lock, owner)  # when that ends


def leave_later(lock: PageLock, owner: Hashable) -> None:
    """As ``leave``, for finalizers: it waits for no other thread and raises nothing."""
    _registry.guard.mark(lock, owner)


def over(accelerator: Accelerator, tensor: Tensor) -> set[PageLock]:
    """The locks in the pages of a tensor's storage, and where that storage was before it moved."""
    storage, alignment = tensor.untyped_storage(), accelerator.capabilities.register_alignment_bytes
    before = storage.data_ptr() % alignment
    table = _registry.tables.get(id(accelerator))
    found = table.overlapping(storage.data_ptr() - before, storage.nbytes() + before) if table is not None else []
    moved = _registry.by_storage.get((id(accelerator), storage._cdata))
    return {*found} if moved is None else {*found, moved}


def give_back_stale(accelerator: Accelerator, tensor: Tensor) -> bool:
    """Unregisters what is stale in the memory of a tensor, and where its storage was registered before it moved.

    Waits for the devices that have read it.

    Returns:
        Whether there was any.

    Raises:
        TransferBusyError: As ``page_lock``.
        Exception: What the accelerator raised.
    """
    stale = [lock for lock in over(accelerator, tensor) if not lock.is_current]
    for lock in stale:
        _registry.guard.alone(_give_back_stale, lock)
    return bool(stale)


def give_back_unowned() -> None:
    """Unregisters what failed registrations have left; raises as ``give_back_stale``."""
    for lock in tuple(_registry.unowned):
        _registry.guard.alone(_give_back_stale, lock)


def owned_by(owner: Hashable) -> list[PageLock]:
    """What ``owner`` holds."""
    return list(_registry.owned.get(owner, ()))


def locked_bytes() -> int:
    """Bytes that are page-locked in place in this process."""
    return sum(table.total_bytes for table in tuple(_registry.tables.values()))


def _join(accelerator: Accelerator, tensor: Tensor, owner: Hashable) -> PageLock | None:
    lock = find(accelerator, tensor)
    if lock is not None:
        storage = tensor.untyped_storage()
        if not lock.has(storage):
            _add_storage(lock, storage)
        _own(lock, owner, storage)
    return lock


def _add_storage(lock: PageLock, storage: torch.UntypedStorage) -> None:
    lock.join(storage, _died)
    _registry.by_storage[id(lock.accelerator), storage._cdata] = lock


def _own(lock: PageLock, owner: Hashable, storage: torch.UntypedStorage) -> None:
    lock.owners.setdefault(owner, set()).add(storage._cdata)
    _registry.owned.setdefault(owner, {})[lock] = None


def _page_lock(accelerator: Accelerator, tensor: Tensor, owner: Hashable, most_bytes: int | None) -> PageLock | None:
    existing = _join(accelerator, tensor, owner)
    if existing is not None:
        return existing
    for lock in over(accelerator, tensor):
        _give_back_stale(lock)
    if accelerator.is_pinned(tensor):
        return None
    lock = PageLock(accelerator, tensor.untyped_storage())
    if most_bytes is not None and locked_bytes() + lock.num_bytes > most_bytes:
        raise OverBudgetError(f"page-locking {lock.num_bytes} bytes in place, beside {locked_bytes()} that are")
    table = _registry.tables.setdefault(id(accelerator), AddressRanges())
    if table.overlapping(lock.address, lock.num_bytes):
        raise RuntimeError("part of it is page-locked as part of other memory")
    try:
        # All is written down before: an interrupt arrives when the long call returns, and so after the registration.
        _registry.unowned[lock] = None
        table.add(lock.address, lock.num_bytes, lock)
        length = lock.address + lock.num_bytes - lock.begin
        if not accelerator.register_host_memory(lock.begin, length):
            raise RuntimeError(f"{accelerator.name} cannot page-lock existing memory")
        lock.state = State.HELD
        _add_storage(lock, tensor.untyped_storage())
        _own(lock, owner, tensor.untyped_storage())
        del _registry.unowned[lock]
    except Exception:
        _forget(lock)  # by the protocol, nothing has changed then
        raise
    except BaseException:
        with contextlib.suppress(Exception):
            _give_back(lock)
        raise
    return lock


def _leave(lock: PageLock, owner: Hashable | None) -> None:
    """Without an owner: the memory is gone. What fails stays LEAVING, and the next who comes by tries again."""
    if owner is None:
        if not lock.storages:  # their memory is gone, so no copy of ours is under way: those keep storages alive
            _give_back(lock)
    elif owner in lock.owners:
        if len(lock.owners) == 1:
            (_give_back if lock.is_current else _give_back_stale)(lock)
        else:
            _disown(lock, owner)


def _give_back_stale(lock: PageLock) -> None:
    if lock.state is State.GONE or lock.is_current:
        return
    # A storage that was moved does not wait for the copies that read it; and another one there counts as pinned.
    for index in lock.devices or (None,):
        lock.accelerator.synchronize(index)
    _give_back(lock)


def _give_back(lock: PageLock) -> None:
    """Unregisters. The caller has waited for every copy that reads the memory."""
    if lock.state is State.GONE:
        return
    # Until the call has returned: an interrupt leaves open whether it was undone.
    was, lock.state = lock.state, State.UNCERTAIN
    try:
        lock.accelerator.unregister_host_memory(lock.begin)
    except Exception:
        if was is not State.UNCERTAIN:  # else it never was registered, or no longer is
            lock.state = State.LEAVING
            raise
    _forget(lock)


def _forget(lock: PageLock) -> None:
    lock.state, lock.memory = State.GONE, None
    table = _registry.tables[id(lock.accelerator)]
    table.remove(lock.address)
    if not len(table):
        del _registry.tables[id(lock.accelerator)]
    for key in lock.storages:
        if _registry.by_storage.get((id(lock.accelerator), key)) is lock:
            _registry.by_storage.pop((id(lock.accelerator), key), None)
    _registry.unowned.pop(lock, None)
    for owner in tuple(lock.owners):
        _disown(lock, owner)


def _disown(lock: PageLock, owner: Hashable) -> None:
    lock.owners.pop(owner, None)
    locks = _registry.owned.get(owner, {})
    locks.pop(lock, None)
    if not locks:
        _registry.owned.pop(owner, None)


def _died(lock: PageLock, key: int) -> None:
    _registry.by_storage.pop((id(lock.accelerator), key), None)
    if not lock.storages and lock.state is not State.GONE:
        leave_later(lock, None)


_registry = _Registry()


def _start_afresh() -> None:
    """In a forked child: another thread may have held the guard, and the registrations are the parent's."""
    global _registry
    _registry = _Registry()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
