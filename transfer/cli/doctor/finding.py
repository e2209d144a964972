"""One line of `h2d doctor`: what was found, what is wanted, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``ok``; ``note``: something would be better otherwise; ``no``: it keeps this package from working; ``unknown``.
Status = Literal["ok", "note", "no", "unknown"]


@dataclass(frozen=True)
class Finding:
    """What one look has found.

    Attributes:
        name: Of what was looked at, in a few characters.
        status: How it is.
        found: A phrase.
        wanted: A phrase; None where what was found is what is wanted.
        remedy: A sentence on what to do; None where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    wanted: str | None = None
    remedy: str | None = None


def ok(name: str, found: str) -> Finding:
    """Something that is as it should be, or merely good to know."""
    return Finding(name, "ok", found)


def note(name: str, found: str, wanted: str, remedy: str) -> Finding:
    """Something that would be better otherwise."""
    return Finding(name, "note", found, wanted, remedy)


def no(name: str, found: str, wanted: str, remedy: str) -> Finding:
    """Something that keeps this package from working."""
    return Finding(name, "no", found, wanted, remedy)


def unknown(name: str, found: str) -> Finding:
    """Something that the system does not tell."""
    return Finding(name, "unknown", found)
