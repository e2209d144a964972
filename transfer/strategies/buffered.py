"""Base of strategies that hold buffers: one copy or close at a time, and a clean way out of each."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import Self

from ..errors import TransferBusyError
from ..interface import HostToDeviceTransfer
from ..memory.holdings import Holdings
from ..memory.owned_locks import OwnedLocks

T = TypeVar("T")


class BufferedTransfer(HostToDeviceTransfer):
    """A strategy whose threads take turns, as they share what is in ``_held``.

    Subclasses write ``_submit``, through ``_take_turn``. A submit from inside another one of the same thread (a signal
    handler, a finalizer) raises ``TransferBusyError``. A close from there takes effect when the outer submit ends.
    """

    _held: Holdings
    _lock: threading.RLock
    _busy: bool  # a copy or close is under way in the thread that holds the lock

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        made = super().__new__(cls, *arguments, **options)
        made._held = Holdings()
        made._lock = threading.RLock()
        made._busy = False
        # Runs when this object is dropped, and at exit while the accelerator still works.
        weakref.finalize(made, _close_all, made._held)
        return made

    @property
    def pinned_bytes(self) -> int:
        return self._held.total("pinned_bytes")

    @property
    def scratch_bytes(self) -> int:
        return self._held.total("scratch_bytes")

    def close(self) -> None:
        if self._is_forked:  # another thread of the parent may have held the lock
            return
        with self._lock:
            self._held.request_close()
            self._close_requested()

    def _close_requested(self) -> None:
        """Closes what is marked; in the middle of a copy of this thread, the end of its turn does that."""
        if self._busy:
            return
        try:
            self._busy = True
            self._held.close_requested()
        finally:
            self._busy = False

    def _take_turn(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs ``work``, which uses what is held, alone; closes what was marked meanwhile.

        One frame, and no generator: a signal at any point of it gives the lock back.

        Raises:
            TransferBusyError: This thread is in the middle of another copy or close.
            Exception: What ``work`` raises.
        """
        with self._lock:
            if self._busy:
                raise TransferBusyError(
                    f"this {type(self).__name__} is in the middle of another copy or close of the same thread: "
                    "submit after it, or from another transfer"
                )
            try:
                self._busy = True
                if self._held.requested:  # an earlier close was interrupted
                    self._held.close_requested()
                result = work(*arguments)
                if self._held.requested:
                    self._held.close_requested()
                return result
            except BaseException:
                with contextlib.suppress(Exception):  # the next close tries again
                    self._held.close_requested()
                raise
            finally:
                self._busy = False


def _close_all(held: Holdings) -> None:
    """A finalizer, so it waits for no other thread's lock."""
    for locks in held.of(OwnedLocks):
        locks.is_abandoned = True
    held.request_close()
    held.close_requested()
