"""``posix``: the system's own ``preadv``, which kept up with DeepSpeed's compiled op wherever both were measured."""

from __future__ import annotations

import errno
import os

from ...errors import SwapCorruptedError, swap_error
from ..memory import ALIGNMENT_BYTES, round_down
from ..open_file import OpenFile
from .reader import Reader


class PosixReader(Reader):
    """Past the page cache with O_DIRECT, or through it where the file system refuses that."""

    name = "posix"

    def read(self, file: OpenFile, offset: int, memory: memoryview, needed: int) -> None:
        done = 0
        while done < needed:
            direct = file.direct
            # A direct read that ended early goes on from an aligned place.
            done = done if direct is None else round_down(done, ALIGNMENT_BYTES)
            try:
                got = os.preadv(file.descriptor if direct is None else direct, [memory[done:]], offset + done)
            except OSError as error:
                if direct is not None and error.errno == errno.EINVAL:
                    file.refuse_direct()
                    continue
                raise swap_error(error, f"{needed} bytes from byte {offset} on cannot be read", file.path) from error
            if done + got < needed and (got == 0 or (direct is not None and got < ALIGNMENT_BYTES)):
                raise SwapCorruptedError(
                    errno.EBADMSG,
                    f"the file ended while it was read: {needed} bytes wanted from byte {offset} on, {done + got} got",
                    str(file.path),
                )
            done += got
