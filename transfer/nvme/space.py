"""Room for a file: taken before anything is written, and what is said where there is none."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from ..errors import NO_ROOM, SwapError, SwapSpaceError, swap_error


def reserve(descriptor: int, path: Path, num_bytes: int) -> None:
    """Takes the space of the whole file, or fails."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        return
    except AttributeError:  # another system
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise
    # A file system that reserves nothing: what is free now is the best guess.
    if shutil.disk_usage(path.parent).free < num_bytes:
        raise no_room(errno.ENOSPC, path, num_bytes)
    os.truncate(descriptor, num_bytes)


def not_written(error: OSError, what: str, path: Path, num_bytes: int) -> SwapError:
    """The error of ours for one of the system's.

    Args:
        error: What writing raised.
        what: What could not be done, as the beginning of a sentence.
        path: Of the file.
        num_bytes: That it was to have.
    """
    if error.errno in NO_ROOM and not isinstance(error, SwapError):
        return no_room(error.errno, path, num_bytes)
    return swap_error(error, what, path)


def no_room(number: int | None, path: Path, num_bytes: int) -> SwapSpaceError:
    """The error for a drive, a quota or a limit that has no room, with what is free and what to do."""
    free: int | str = "an unknown number of"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(path.parent).free
    remedy = "Free some, or swap out to another drive."
    if number == errno.EFBIG:
        remedy = "The process may not write files so large: raise its limit (`ulimit -f`)."
    message = f"{os.strerror(number or errno.ENOSPC)}: {num_bytes} bytes wanted, {free} free. {remedy}"
    return SwapSpaceError(number, message, str(path))
