"""Files of swapped values: opened, checked against their handle, and read by ``preadv``."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SwapCorruptedError, swap_error
from .aligned_memory import ALIGNMENT_BYTES, round_up
from .file_format import Header, corrupted, read_header
from .open_file import NOT_DIRECT, check_size, open_direct, opened
from .swapped_tensor import SwappedTensor

logger = logging.getLogger("transfer")


class OpenFile:
    """An open file of swapped values. Threads may share one object.

    Args:
        path: Its path, for messages.
        descriptor: Reads through the page cache.
        direct: Reads past the page cache, in aligned units; None where the file system refuses that.

    Attributes:
        path: As given.
    """

    def __init__(self, path: Path, descriptor: int, direct: int | None) -> None:
        self.path = path
        self._descriptor = descriptor
        self._direct = direct

    def read(self, offset: int, memory: memoryview, needed: int) -> None:
        """Fills ``memory`` from the file; blocks until it is done.

        Args:
            offset: Of the first byte. Where the file is read directly, it, the address and the length of ``memory``
                are aligned.
            memory: Bytes to write to.
            needed: How many of its bytes must come from the file; the rest may lie beyond its end.

        Raises:
            SwapError: The file cannot be read, or ends too early. The memory is undefined then.
        """
        done = 0
        while done < needed:
            # A direct read that ended early leaves an unaligned rest, which is read through the page cache.
            direct = self._direct if done % ALIGNMENT_BYTES == 0 else None
            try:
                got = os.preadv(self._descriptor if direct is None else direct, [memory[done:]], offset + done)
            except OSError as error:
                if direct is not None and error.errno in NOT_DIRECT:  # opened with O_DIRECT, but does not read so
                    logger.info("%s cannot be read with O_DIRECT: it is read through the page cache", self.path)
                    self._direct = None
                    continue
                raise swap_error(error, f"{needed} bytes from byte {offset} on cannot be read", self.path) from error
            if got == 0:
                raise SwapCorruptedError(
                    errno.EBADMSG,
                    f"the file ended while it was read: {needed} bytes wanted from byte {offset} on, {done} got",
                    str(self.path),
                )
            done += got


@contextmanager
def open_swapped(swapped: SwappedTensor, direct: bool = True) -> Iterator[OpenFile]:
    """The file of a handle, checked.

    Args:
        swapped: Has at least one element.
        direct: Whether reads should go past the page cache, where the file system allows it.

    Raises:
        SwapError: It cannot be opened.
        SwapCorruptedError: It is too short, or is not the file that ``swap_out`` wrote.
    """
    with opened(swapped.path) as descriptor:
        if swapped.stamp is not None:
            _check_ours(descriptor, swapped)
        check_size(descriptor, swapped.path, swapped.offset_bytes, swapped.nbytes)
        second = open_direct(swapped.path, descriptor) if direct else None
        try:
            yield OpenFile(swapped.path, descriptor, second)
        finally:
            if second is not None:
                os.close(second)


def _check_ours(descriptor: int, swapped: SwappedTensor) -> None:
    size = os.fstat(descriptor).st_size
    if size < swapped.offset_bytes:  # cut inside its header, which would only be called damaged
        written = swapped.offset_bytes + round_up(swapped.nbytes, ALIGNMENT_BYTES)
        raise corrupted(swapped.path, f"it was written with {written} bytes and now has {size}")
    header = read_header(descriptor, swapped.path)
    if swapped.checksums is not None and len(swapped.checksums.table) != header.table_bytes:
        raise corrupted(swapped.path, "the handle has another number of checksums")
    if header.stamp != swapped.stamp:
        raise corrupted(swapped.path, "another file has taken its place since")
    checksum_bytes = swapped.checksums.checksum_bytes if swapped.checksums is not None else header.checksum_bytes
    name = str(swapped.dtype).removeprefix("torch.")
    mine = Header(name, tuple(swapped.shape), swapped.offset_bytes, checksum_bytes, header.stamp)
    if mine != header:
        raise corrupted(
            swapped.path,
            f"it holds {header.dtype} {header.shape} from byte {header.offset_bytes} on, and {name} {mine.shape} "
            f"from byte {mine.offset_bytes} on was wanted",
        )
    if size != header.file_bytes:
        raise corrupted(swapped.path, f"it was written with {header.file_bytes} bytes and now has {size}")
