"""Warnings that point at the caller's line, however deep in this package they arise."""

from __future__ import annotations

import sys
import warnings

from .errors import TransferWarning

_OURS = ("transfer", "contextlib")


def warn_caller(message: str, category: type[TransferWarning]) -> None:
    """``warnings.warn`` at the innermost frame outside this package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
