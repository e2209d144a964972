"""Every way bytes come from a file into memory, one file each: ``posix`` and DeepSpeed's ``aio``."""

from __future__ import annotations

from .reader import Reader, make_reader

__all__ = ["Reader", "make_reader"]
