"""Regular files, opened for reading, and O_DIRECT."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SwapCorruptedError, SwapError, swap_error

#: How file systems refuse O_DIRECT.
NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
#: 0 on systems without it.
O_DIRECT = getattr(os, "O_DIRECT", 0)


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """The descriptor of a regular file, opened for reading.

    Raises:
        SwapError: It cannot be opened, or is not a regular file; the subclass says which.
    """
    try:
        # Asked first: to open a pipe would block.
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - as close to open as can be
            raise SwapError(errno.EINVAL, "values are read from regular files, and this is not one", str(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except SwapError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        gone = "; a file of swap_out goes with its handle, and with the process that wrote it"
        hint = gone if isinstance(error, FileNotFoundError) else ""
        raise swap_error(error, f"the values cannot be read{hint}", path) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_direct(path: Path, descriptor: int, flags: int = os.O_RDONLY) -> int | None:
    """A second descriptor of a file that is open, which goes past the page cache; the caller closes it.

    None where the system or the file system refuses O_DIRECT.
    """
    if not O_DIRECT:
        return None
    try:
        second = os.open(path, flags | os.O_CLOEXEC | O_DIRECT)
    except OSError:
        return None
    if not os.path.samestat(os.fstat(second), os.fstat(descriptor)):  # replaced in between
        os.close(second)
        return None
    return second


def check_size(descriptor: int, path: Path, offset_bytes: int, num_bytes: int) -> None:
    """Checks that the values are all there.

    Raises:
        SwapCorruptedError: The file is too short.
    """
    size = os.fstat(descriptor).st_size
    if offset_bytes + num_bytes > size:
        raise SwapCorruptedError(
            errno.EBADMSG,
            f"the file is too short: {num_bytes} bytes wanted from byte {offset_bytes} on, and it ends at byte {size}; "
            "look at dtype, shape and offset, or restore it",
            str(path),
        )
