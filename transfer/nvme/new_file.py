"""New files, whose space is taken before anything is written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import NO_ROOM, SwapError, SwapSpaceError, swap_error
from .open_file import open_direct


@contextlib.contextmanager
def created(path: Path, num_bytes: int) -> Iterator[tuple[int, int | None]]:
    """Descriptors of a new file (mode 0600) that has its space, to read and write it in the block.

    Yields:
        A descriptor that goes through the page cache; and one that goes past it, or None where the file system
        refuses that.

    Raises:
        SwapSpaceError: Less is free, on a file system that cannot reserve space.
        OSError: What the system raises, for ``not_written`` to explain. The file may exist then.
    """
    with contextlib.ExitStack() as closing:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        closing.callback(os.close, descriptor)
        _reserve(descriptor, path, num_bytes)
        direct = open_direct(path, descriptor, os.O_RDWR)
        if direct is not None:
            closing.callback(os.close, direct)
        yield descriptor, direct


def not_written(error: OSError, what: str, path: Path, num_bytes: int) -> SwapError:
    """As ``swap_error``, for a file of ``num_bytes``: where there is no room, it says how much there is."""
    if error.errno in NO_ROOM and not isinstance(error, SwapError):
        return _no_room(error.errno, path, num_bytes)
    return swap_error(error, what, path)


def reserve(descriptor: int, num_bytes: int) -> bool:
    """Takes the space of a file's first bytes; False where the system or the file system reserves nothing.

    Raises:
        OSError: What the system raises; one of ``NO_ROOM`` where there is none.
    """
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except AttributeError:  # another system
        return False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise
        return False
    return True


def _reserve(descriptor: int, path: Path, num_bytes: int) -> None:
    if reserve(descriptor, num_bytes):
        return
    # A file system that reserves nothing: what is free now is the best guess.
    if shutil.disk_usage(path.parent).free < num_bytes:
        raise _no_room(errno.ENOSPC, path, num_bytes)
    os.truncate(descriptor, num_bytes)


def _no_room(number: int | None, path: Path, num_bytes: int) -> SwapSpaceError:
    """The error for a drive, a quota or a limit that has no room, with what is free and what to do."""
    free: int | str = "an unknown number of"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(path.parent).free
    remedy = "Free some, or swap out to another drive."
    if number == errno.EFBIG:
        remedy = "The process may not write files so large: raise its limit (`ulimit -f`)."
    message = f"{os.strerror(number or errno.ENOSPC)}: {num_bytes} bytes wanted, {free} free. {remedy}"
    return SwapSpaceError(number, message, str(path))
