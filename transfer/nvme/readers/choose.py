"""Which readers there are, and the one that a configuration asks for."""

from __future__ import annotations

from .posix import PosixReader
from .reader import Reader

#: The names that a configuration may say.
READERS = ("posix", "aio")


def make_reader(name: str) -> tuple[Reader, str | None]:
    """The reader of this name, or what stands in for it.

    Returns:
        The reader, and why it is another one than was asked for, as one sentence, or None.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in READERS:
        raise ValueError(f"there is no reader {name!r}, only {' and '.join(READERS)}")
    if name == "aio":
        from .aio import AioReader, why_not_aio

        reason = why_not_aio()
        return (AioReader(), None) if reason is None else (PosixReader(), reason)
    return PosixReader(), None
