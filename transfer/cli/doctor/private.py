"""A report that is made to be pasted into a public issue names neither people nor machines nor what is private."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .finding import Finding

#: Values that are shorter say nothing, and are part of other words.
_LEAST = 4
#: Homes of people other than the one who runs this.
_HOMES = re.compile(r"(/home|/Users|/users)/[^/\s:`'\"]+")
#: Any absolute path, with what stands for it: its last part.
_PATH = re.compile(r"(?<![\w.~<>])(/[^\s:`'\",;()]+)")


def without_names(finding: Finding, given: str | None = None) -> Finding:
    """The same with ``~``, ``<host>``, ``<user>``, ``<DIR>`` and variables' names for what they stand for.

    Args:
        finding: What was found.
        given: A directory that the user gave.
    """
    remedy = None if finding.remedy is None else _clean(finding.remedy, given)
    return replace(finding, found=_clean(finding.found, given), remedy=remedy)


def _clean(text: str, given: str | None) -> str:
    if given:
        text = text.replace(given, "<DIR>")
    for value, name in _secrets():
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", name, text)
    text = _HOMES.sub("~", text)
    return _PATH.sub(lambda found: f"<path>/{Path(found[1]).name}" if found[1].count("/") > 1 else found[1], text)


def _secrets() -> Iterator[tuple[str, str]]:
    """What must not be told, the longest first, and what to say instead."""
    found = {value: f"${name}" for name, value in os.environ.items() if len(value) >= _LEAST and "/" in value}
    host = socket.gethostname()
    found |= {value: "<host>" for value in (host, host.partition(".")[0]) if len(value) >= _LEAST}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for the user
        user = ""
    if len(user) >= _LEAST:
        found[user] = "<user>"
    home = str(Path.home())
    if len(home) >= _LEAST:
        found[home] = "~"
    yield from sorted(found.items(), key=lambda pair: -len(pair[0]))
