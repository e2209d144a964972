"""Calls on the threads of a pool, or in this thread where no other can be started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


def start_on(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T] | None:
    """As ``pool.submit``; None, without the call, where no thread can be started: at a limit, or at the exit."""
    once = _Once(call)
    try:
        pool.submit(once)
    except RuntimeError:  # and the pool may have queued it nevertheless
        return None if once.claim() else once.future
    return once.future


def run_on(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """As ``start_on``; makes the call in this thread where ``start_on`` would return None."""
    future = start_on(pool, call)
    if future is None:
        here = _Once(call)
        here()
        return here.future
    return future


class _Once(Generic[T]):
    """A call that is made at most once, by the thread that claims it first."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call = call
        self._unclaimed = threading.Lock()

    def claim(self) -> bool:
        """Whether this is the first claim."""
        return self._unclaimed.acquire(blocking=False)

    def __call__(self) -> None:
        if not self.claim() or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - the waiter gets all of them
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
