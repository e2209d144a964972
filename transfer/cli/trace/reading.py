"""The events of a trace in Chrome's format, one by one: a file of gigabytes takes the memory of a few reads.

A trace is an object with a list ``traceEvents``, or a bare list of events, which may lack its end. Files that gzip has
packed are unpacked on the way. What stands beside the events is not looked at.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

_READ_BYTES = 2**20
#: An event that is longer is none, and a file in which the events have not begun until there is no trace.
_LONGEST = 64 * 2**20
_BEGINNING = re.compile(r'\A\s*\[|"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_decode = json.JSONDecoder().raw_decode


class TraceError(Exception):
    """A file cannot be read as a trace. The text says why, in one sentence."""


def events(path: str, read: Callable[[int], object] = lambda _: None) -> Iterator[dict[str, Any]]:
    """Yields every event that is an object.

    Args:
        path: The file.
        read: Is called with the number of the file's bytes that were read so far.

    Raises:
        TraceError: The file cannot be opened or unpacked, is no trace, or ends in the middle of an event.
    """
    try:
        with Path(path).open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            unpacked: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            yield from _events(path, _texts(unpacked, lambda: read(raw.tell())))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no trace: it is no text") from error
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _texts(file: IO[bytes], after: Callable[[], object]) -> Iterator[str]:
    """The file's text in parts; a character may lie in two of them."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while part := file.read(_READ_BYTES):
        after()
        yield decoder.decode(part)
    decoder.decode(b"", final=True)


def _events(path: str, texts: Iterator[str]) -> Iterator[dict[str, Any]]:
    text = ""
    while (beginning := _BEGINNING.search(text)) is None:
        more = next(texts, None)
        if more is None or len(text) > _LONGEST:
            raise TraceError(f"{path} is no trace of a profiler: it has no list `traceEvents`")
        text += more
    at, is_list = beginning.end(), not beginning[0].startswith('"')
    while True:
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
        if text.startswith("]", at):
            return
        try:
            event, end = _decode(text, at)
        except json.JSONDecodeError as error:
            more = next(texts, None)
            if more is None and is_list and at == len(text):
                return
            if more is None or len(text) - at > _LONGEST:
                raise TraceError(f"{path} ends in the middle of an event, or has one that is no JSON") from error
            text, at = text[at:] + more, 0
            continue
        at = end
        if isinstance(event, dict):
            yield event
