"""The page-locks of one strategy, as holdings."""

from __future__ import annotations

from collections.abc import Callable

from . import page_locks
from .page_lock import PageLock


class OwnedLocks:
    """The page-locks of one owner, as a holding.

    Args:
        settle: Blocks until no copy of the owner's is under way.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self.settle = settle
        #: Its owner is dead, and a finalizer closes it.
        self.is_abandoned = False

    @property
    def page_locked_bytes(self) -> int:
        """Bytes that are page-locked for the owner."""
        return sum(lock.num_bytes for lock in page_locks.owned_by(self))

    pinned_bytes = page_locked_bytes

    def open(self) -> None:
        """Does nothing: the first ``page_lock`` takes the first lock."""

    def close(self) -> None:
        """Leaves all of them, and gives back what failed registrations have left."""
        self.settle()
        for lock in page_locks.owned_by(self):
            self.leave(lock)
        if not self.is_abandoned:
            page_locks.give_back_unowned()

    def leave(self, lock: PageLock) -> None:
        """Leaves one of them. The caller has waited for the owner's copies; raises what ``page_locks.leave`` does."""
        (page_locks.leave_later if self.is_abandoned else page_locks.leave)(lock, self)


class LeavingLock:
    """A holding whose ``close`` makes the owner leave a page-lock."""

    def __init__(self, lock: PageLock, owned: OwnedLocks) -> None:
        self._lock = lock
        self._owned = owned

    def open(self) -> None:
        """Does nothing: the lock is held already."""

    def close(self) -> None:
        """Waits for the owner's copies, and leaves."""
        self._owned.settle()
        self._owned.leave(self._lock)
