"""A registry of named factories, filled by calls and by entry points.

``accelerators`` and ``transfer`` keep one each. Entry points stay unloaded until their name is
asked for, so an installed plug-in costs nothing to those who do not use it.
"""

from __future__ import annotations

import difflib
import pkgutil
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Generic, TypeVar, cast

T = TypeVar("T")


def nearest(name: str, allowed: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The entry of ``allowed`` that ``name`` was most likely meant to be, case aside, or None."""
    folded = {entry.lower(): entry for entry in allowed}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


class Registry(Generic[T]):
    """Names to values, from ``add`` and from an entry-point group. Thread-safe.

    Finding the entry points reads a file of each package that is installed. They are found once, and again where
    ``sys.path`` or one of its folders has changed, as an installation does. What changes the entry points of a package
    in place, in its own folder, is seen by a new process.

    Args:
        kind: What is registered, for messages (``"accelerator"``).
        group: The entry-point group (``"transfer.accelerators"``).
        refused: Raised by ``add``, and by ``get`` for a name that was registered twice.
        unknown: Raised by ``get`` for a name that is not registered.
        synonyms: Other names in lower case, each with the registered name that is meant; for hints alone.
        own: Names that are registered from the beginning, and where each value is: ``package.module:name``. It is
            imported when it is asked for.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        refused: type[Exception],
        unknown: type[Exception],
        synonyms: Mapping[str, str] | None = None,
        own: Mapping[str, str] | None = None,
    ) -> None:
        self._kind, self._group = kind, group
        self._synonyms = synonyms or {}
        self._refused, self._unknown = refused, unknown
        self._entries: dict[str, T] = {}
        self._own = dict(own or {})  # those that were not asked for yet
        self._points: metadata.EntryPoints | None = None
        self._points_of: object = None  # how the module path was when they were found
        self._lock = threading.RLock()

    def add(self, name: str, value: T) -> None:
        """Registers ``value``; a taken or unusable name is refused and changes nothing."""
        if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
            raise self._refused(
                f"{self._kind} name {name!r} cannot be registered: use a lower-case identifier such as 'acme'"
            )
        with self._lock:
            if name in self._entries or name in self._own:
                known = self._entries.get(name, self._own.get(name))
                raise self._refused(f"{self._kind} {name!r} is registered already, as {known!r}")
            self._entries[name] = value

    def remove(self, name: str) -> None:
        """Forgets what ``add`` registered under ``name``; does nothing for an unknown name."""
        with self._lock:
            self._entries.pop(name, None)
            self._own.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """Every registered name, sorted. Loads no plug-in."""
        with self._lock:
            return tuple(sorted({*self._entries, *self._own, *(point.name for point in self._entry_points())}))

    def get(self, name: str) -> T:
        """The value under ``name``, loading its entry point if it has one."""
        with self._lock:
            points = [point for point in self._entry_points() if point.name == name]
            if len(points) + (name in self._entries or name in self._own) > 1:
                owners = ", ".join(sorted(_owner(point) for point in points))
                raise self._refused(
                    f"{self._kind} {name!r} is claimed more than once (entry points of: {owners}); "
                    "uninstall one of them or register under another name"
                )
            if points:
                try:
                    return cast(T, points[0].load())
                except Exception as error:
                    raise self._refused(
                        f"{self._kind} {name!r}: loading the entry point {points[0].value!r} of "
                        f"{_owner(points[0])} failed: {error}"
                    ) from error
            if name in self._own:
                self._entries[name] = pkgutil.resolve_name(self._own[name])
                del self._own[name]
            if name in self._entries:
                return self._entries[name]
        raise self._unknown(self.explain_unknown(name))

    def explain_unknown(self, name: object, *also: str) -> str:
        """The sentence for an unknown name: which names exist, and which was probably meant.

        Args:
            name: What was given.
            *also: Names that are allowed beside the registered ones.
        """
        names = sorted((*self.names(), *also))
        guess = self._synonyms.get(name.lower()) or nearest(name, names) if isinstance(name, str) else None
        hint = f" Did you mean {guess!r}?" if guess else ""
        return f"unknown {self._kind} {name!r}.{hint} Registered: {', '.join(names)}."

    def _entry_points(self) -> metadata.EntryPoints:
        find = metadata.entry_points  # part of the key: another one, such as a test's own, may find others
        now = find, [_state(entry) for entry in sys.path if isinstance(entry, str)]
        if self._points is None or now != self._points_of:
            self._points, self._points_of = find(group=self._group), now
        return self._points


def _state(entry: str) -> object:
    """What changes when a package is installed into an entry of ``sys.path``, or removed from it."""
    try:
        found = Path(entry).stat()
    except (OSError, ValueError):
        return entry
    return entry, found.st_dev, found.st_ino, found.st_mtime_ns


def _owner(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"
