"""Processes that take turns: each has one model and makes one iteration when it is told to, while the others wait.

A store in this process holds the turns. A process whose turn's key is absent waits for it; the value says what to do.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..measuring.ranks import RanksFailedError, launch

_GO, _STOP = "go", "stop"
_LONG = dt.timedelta(days=1)  #: A turn comes when the others have had theirs, however long that takes.


class Turns:
    """The side of one process: every rank asks the store itself."""

    def __init__(self, place: Mapping[str, Any]) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._name, self._number = place["name"], 0
        self._store = TCPStore("127.0.0.1", place["port"], is_master=False, wait_for_workers=False, timeout=_LONG)

    def next(self) -> bool:
        """Blocks until this process has its turn; False: there is none any more."""
        key = f"{self._name}/{self._number}"
        self._store.wait([key])
        return bool(self._store.get(key).decode() == _GO)

    def done(self) -> None:
        """Ends the turn."""
        self._store.set(f"{self._name}/{self._number}/done", "")
        self._number += 1


def take_turns(
    worker: str, options: Mapping[str, Any], names: Sequence[str], advance: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Runs ``worker`` in processes of its own for each name, all alive at once, one turn of each a round.

    The first round, in which each makes its model and warms up, is not limited; ``limit_seconds`` counts it.

    Returns:
        What each worker returned, by name, and what has failed, with reasons.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: dict[str, Any] = {}
    not_run: list[dict[str, str]] = []

    def run(name: str) -> None:
        given = {**options, "peer": name, "turns": {"name": name, "port": store.port}}
        try:
            results[name] = launch(worker, given, options["ranks"], threads=options["threads"], deepspeed=True)
        except RanksFailedError as error:
            not_run.append({"variant": name, "reason": str(error)})

    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in names}
    began, number = time.monotonic(), 0
    try:
        for name, thread in threads.items():  # one after the other: each has the machine while it makes its model
            thread.start()
            _turn(store, thread, name, number)
            advance(name)
        warmed, limit = time.monotonic(), options["limit_seconds"] or float("inf")
        while number < options["steps"]:
            now = time.monotonic()
            if number and now - began + (now - warmed) / number > limit:
                break
            number += 1
            for name, thread in threads.items():
                _turn(store, thread, name, number)
                advance(name)
    finally:
        for name in threads:
            for each in (number, number + 1):
                if not store.check([f"{name}/{each}"]):
                    store.set(f"{name}/{each}", _STOP)
        for thread in threads.values():
            if thread.ident is not None:
                thread.join()
    return results, not_run


def _turn(store: Any, thread: threading.Thread, name: str, number: int) -> None:
    """Lets one process have its turn. Blocks until it has ended, or the process has."""
    store.set(f"{name}/{number}", _GO)
    while thread.is_alive() and not store.check([f"{name}/{number}/done"]):
        time.sleep(0.001)
