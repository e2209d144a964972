"""Paths as users write them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import SwapFileNotFoundError


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path, whatever the working directory becomes; ``~`` stands for the home directory. Links are kept.

    Raises:
        SwapFileNotFoundError: It is empty; or there is no such user, or nobody's home.
    """
    if not os.fspath(path):  # which pathlib would take for the working directory
        raise SwapFileNotFoundError(errno.ENOENT, "the path is empty", "")
    try:
        return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - `resolve` would follow links
    except RuntimeError as error:
        message = "there is no such home directory; write the path without `~`"
        raise SwapFileNotFoundError(errno.ENOENT, message, str(path)) from error
