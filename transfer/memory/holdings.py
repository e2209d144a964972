"""What one strategy holds: rings, page-locks, threads, each kept by a key and given back by ``close``."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from ..errors import run_all


class Holding(Protocol):
    """Something that takes resources in ``open`` and gives them back in ``close``."""

    def open(self) -> None:
        """Takes the resources. What a failure leaves taken, ``close`` gives back."""

    def close(self) -> None:
        """Waits for the copies that use the resources, and gives them back. Idempotent."""


class Threads:
    """A pool of threads, as a holding."""

    def __init__(self, number: int) -> None:
        self.pool = ThreadPoolExecutor(number, thread_name_prefix="h2d-read")

    def open(self) -> None:
        """Does nothing: the pool starts threads when it is given work."""

    def close(self) -> None:
        """Waits for the threads and ends them."""
        self.pool.shutdown()


HoldingT = TypeVar("HoldingT", bound=Holding)


class Holdings:
    """Holdings by key, closed in the reverse order of their making.

    A close has two steps, because a finalizer or a signal handler may ask for it in the middle of a copy of the same
    thread. ``request_close`` marks. ``close_requested``, called between copies, waits and gives back. A new copy uses
    nothing that is marked. After a fork the child holds nothing.

    Not thread-safe: its owner holds a lock around ``get`` and ``close_requested``.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, Any] = {}
        #: The keys of what is to be closed.
        self.requested: set[Hashable] = set()
        self._opening: set[Hashable] = set()  # apart, as a close may be requested while something opens
        self._process: int | None = None

    def get(self, key: Hashable, make: Callable[[], HoldingT]) -> HoldingT:
        """What is held under ``key``, or else what ``make`` returns, opened.

        Raises:
            Exception: What opening it raises. It is not held then, unless closing it failed too: ``close_requested``
                tries that again.
        """
        if key in self._held and key not in self.requested and key not in self._opening:
            held: HoldingT = self._held[key]
            return held
        self._close(key)  # marked by a close inside the copy that asks now
        self._process = os.getpid()
        made = make()
        self._opening.add(key)  # first, so that what an interrupt leaves half open is closed and not used
        self._held[key] = made
        try:
            made.open()
        except BaseException:
            with contextlib.suppress(Exception):
                self._close(key)
            raise
        self._opening.discard(key)
        return made

    def total(self, attribute: str) -> int:
        """The sum of an attribute, such as ``pinned_bytes``, over the holdings that have it."""
        return sum(getattr(held, attribute, 0) for held in tuple(self._held.values()))

    def of(self, kind: type[HoldingT]) -> list[HoldingT]:
        """Everything that is held of this class."""
        return [held for held in tuple(self._held.values()) if isinstance(held, kind)]

    def request_close(self, *keys: Hashable) -> None:
        """Marks what is held under these keys; without keys, everything."""
        self.requested.update(keys or tuple(self._held))

    def close_requested(self) -> None:
        """Closes what is marked.

        Raises:
            Exception: The first error of them. What raised stays marked, and the others are closed.
        """
        while marked := [key for key in reversed(self._held) if key in self.requested or key in self._opening]:
            run_all([functools.partial(self._close, key) for key in marked])  # again: closing may ask for more

    def _close(self, key: Hashable) -> None:
        held = self._held.get(key)
        if held is not None and self._is_here:
            held.close()
        self._held.pop(key, None)
        self.requested.discard(key)
        self._opening.discard(key)

    @property
    def _is_here(self) -> bool:
        """False in a fork of the process that holds this."""
        return self._process == os.getpid()
