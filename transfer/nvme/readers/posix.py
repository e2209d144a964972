"""``posix``: the system's own ``preadv``, which kept up with DeepSpeed's compiled op wherever both were measured."""

from __future__ import annotations

import errno
import os

from ...errors import SwapCorruptedError, swap_error
from ..aligned_memory import ALIGNMENT_BYTES
from ..open_file import NOT_DIRECT
from ..open_swapped import OpenFile
from .reader import Reader


class PosixReader(Reader):
    """Past the page cache with O_DIRECT, or through it where the file system refuses that."""

    name = "posix"

    def read(self, file: OpenFile, offset: int, memory: memoryview, needed: int) -> None:
        done = 0
        while done < needed:
            # What a direct read that ended early has left begins anywhere, and comes through the page cache.
            direct = file.direct if done % ALIGNMENT_BYTES == 0 else None
            try:
                got = os.preadv(file.descriptor if direct is None else direct, [memory[done:]], offset + done)
            except OSError as error:
                if direct is not None and error.errno in NOT_DIRECT:
                    file.refuse_direct()
                    continue
                raise swap_error(error, f"{needed} bytes from byte {offset} on cannot be read", file.path) from error
            if got == 0:
                raise SwapCorruptedError(
                    errno.EBADMSG,
                    f"the file ended while it was read: {needed} bytes wanted from byte {offset} on, {done} got",
                    str(file.path),
                )
            done += got
