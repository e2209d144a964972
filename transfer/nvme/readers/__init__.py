"""Every way bytes come from a file into memory, one file each: ``posix`` and DeepSpeed's ``aio``."""

from __future__ import annotations

from .choose import READERS, make_reader
from .reader import Reader

__all__ = ["READERS", "Reader", "make_reader"]
