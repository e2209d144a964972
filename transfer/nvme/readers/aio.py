"""``aio``: DeepSpeed's op on libaio, where it is built already, behind guards.

The op is raw: it leaves the end of a length that is not a multiple of 512 unread and reports success, and it ends
the process where a file is shorter than the buffer or memory cannot be locked. What it could not read right is
read by ``posix``. It does not look at what the kernel says of each request, either, so a read that failed passes
as done: files without checksums are left to ``posix`` altogether.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from accelerators import deepspeed_aio

from ..open_swapped import OpenFile
from .posix import PosixReader
from .reader import Reader

#: The op's unit of lengths and offsets.
_UNIT_BYTES = 512


def why_not_aio() -> str | None:
    """Why the op cannot be used here, as one sentence, or None."""
    return deepspeed_aio.unavailable_reason()


class AioReader(Reader):
    """One handle of the op for each thread: its waits are for everything that a handle has pending."""

    name = "aio"
    notices_failures = False

    def __init__(self) -> None:
        self._posix = PosixReader()
        self._handles = threading.local()

    def read(self, file: OpenFile, offset: int, memory: memoryview, needed: int) -> None:
        length = len(memory)
        # The size of now: the file may have been cut off since it was opened, which the op does not survive.
        size = os.fstat(file.descriptor).st_size
        fits = offset % _UNIT_BYTES == 0 and length % _UNIT_BYTES == 0 and offset + length <= size
        # By its descriptor: the path might lead to another file by now.
        if not (
            fits
            and file.direct is not None
            and deepspeed_aio.read(self._handle(), memory, f"/proc/self/fd/{file.direct}", offset)
        ):
            self._posix.read(file, offset, memory, needed)

    def _handle(self) -> Any:
        handle = getattr(self._handles, "handle", None)
        if handle is None:
            handle = self._handles.handle = deepspeed_aio.make_handle()
        return handle
