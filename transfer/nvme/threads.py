"""Calls on the threads of a pool, or in this thread where no other can be started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


def run_on(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """As ``pool.submit``; blocks for the call itself at a limit of threads, and at the end of the process."""
    once = _Once(call)
    try:
        pool.submit(once)
    except RuntimeError:
        once()
    return once.future


class _Once(Generic[T]):
    """A call that is made once: a pool that could not start a thread has queued it nevertheless."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call = call
        self._unclaimed = threading.Lock()

    def __call__(self) -> None:
        if not self._unclaimed.acquire(blocking=False) or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - all of them are the waiter's
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
