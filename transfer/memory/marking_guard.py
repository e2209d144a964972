"""A lock for changes that finalizers ask for, too: they mark what is to be done and wait for no one."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import TransferBusyError

T = TypeVar("T")


class MarkingGuard:
    """One change at a time in the process.

    Args:
        serve: Does what is marked, given the arguments of ``mark``. Its errors are dropped, as a finalizer has no
            caller: what fails must stay visible to the next explicit change.
    """

    def __init__(self, serve: Callable[..., object]) -> None:
        self._serve = serve
        self._lock = threading.RLock()
        self._busy = False  # the thread that holds the lock is in the middle of a change
        self._marks: deque[tuple[Any, ...]] = deque()

    def alone(self, change: Callable[..., T], *arguments: Any) -> T:
        """Runs one change; afterwards serves what was marked meanwhile.

        Raises:
            TransferBusyError: This thread is in the middle of another one: a signal handler or a finalizer asks.
            Exception: What ``change`` raises.
        """
        try:
            with self._lock:
                if self._busy:
                    raise TransferBusyError(
                        "this thread is in the middle of page-locking or of giving back: prepare and submit after it"
                    )
                try:
                    self._busy = True
                    return change(*arguments)
                finally:
                    self._busy = False
        finally:
            self._serve_marks()

    def mark(self, *arguments: Any) -> None:
        """Asks for ``serve(*arguments)``: at once where no change is under way, else at the end of that change."""
        self._marks.append(arguments)
        self._serve_marks()

    def _serve_marks(self) -> None:
        # Where another thread has the lock, it comes here when it lets go.
        while self._marks and self._lock.acquire(blocking=False):
            try:
                if self._busy:
                    return
                try:
                    self._busy = True
                    with contextlib.suppress(Exception):  # IndexError: another thread was faster
                        self._serve(*self._marks.popleft())
                finally:
                    self._busy = False
            finally:
                self._lock.release()
