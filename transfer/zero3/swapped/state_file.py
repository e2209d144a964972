"""A file of DeepSpeed's with one tensor of a sub-group's state, read and written in parts."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import NO_ROOM, SwapSpaceError, swap_error
from ...nvme.new_file import reserve
from ...nvme.open_file import NOT_DIRECT, check_size, open_direct

logger = logging.getLogger("transfer")

#: Seconds before each further attempt.
_RETRIES = (0.05, 0.25, 1.0)


class StateFile:
    """A file that exists in full; its space on the drive is taken when it is opened.

    Reads and writes go past the page cache where the file system allows it. They may be made by several threads at once
    for parts that do not overlap.

    Args:
        path: Of the file.
        num_bytes: What it must have at least.

    Attributes:
        num_bytes: What it has.

    Raises:
        SwapSpaceError: The drive has no room for all of it.
        SwapError: It cannot be opened for reading and writing, or is too short; the subclass says why.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        self.path = Path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise swap_error(error, "optimizer state cannot be read and written", path) from error
        try:
            check_size(self._descriptor, self.path, 0, num_bytes)
            self.num_bytes = os.fstat(self._descriptor).st_size
            self._take_space()
            self._direct = open_direct(self.path, self._descriptor, os.O_RDWR)
            self.note()
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def is_there(self) -> bool:
        """Whether its path still leads to it."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def note(self) -> None:
        """Remembers when it was last written."""
        self._noted = self._written_last()

    @property
    def is_as_noted(self) -> bool:
        """Whether its path still leads to it, and nothing was written since ``note``."""
        return self.is_there and self._noted == self._written_last()

    def read(self, offset: int, memory: memoryview) -> None:
        """Fills ``memory`` from byte ``offset`` on. Blocks; what fails is tried again a few times.

        Raises:
            SwapCorruptedError: The file ends before.
            SwapError: The system's error, with the file and what was to be read.
        """
        self._persist("read", os.preadv, offset, memory)

    def write(self, offset: int, memory: memoryview) -> None:
        """Writes all of ``memory`` from byte ``offset`` on; raises as ``read``."""
        self._persist("written", os.pwritev, offset, memory)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        for descriptor in (self._direct, self._descriptor):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._direct, self._descriptor = None, -1

    def _written_last(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_mtime_ns, found.st_size

    def _take_space(self) -> None:
        try:
            reserve(self._descriptor, self.num_bytes)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise SwapSpaceError(
                    error.errno, f"no room for {self.num_bytes} bytes of optimizer state", str(self.path)
                ) from error

    def _persist(self, what: str, call: Callable[..., int], offset: int, memory: memoryview) -> None:
        for seconds in (*_RETRIES, None):
            try:
                self._all(call, offset, memory)
                break
            except OSError as error:
                if seconds is None:
                    failed = f"{len(memory)} bytes of optimizer state from byte {offset} on cannot be {what}"
                    raise swap_error(error, failed, self.path) from error
                time.sleep(seconds)

    def _all(self, call: Callable[..., int], offset: int, memory: memoryview) -> None:
        """Until all is read or written: the system may do a part at a time."""
        descriptor: Any = self._descriptor if self._direct is None else self._direct
        at = 0
        while at < len(memory):
            try:
                done = call(descriptor, [memory[at:]], offset + at)
            except OSError as error:
                if error.errno not in NOT_DIRECT or descriptor == self._descriptor:
                    raise
                if at == 0:
                    logger.info(
                        "O_DIRECT is refused for %d bytes of %s: through the page cache", len(memory), self.path
                    )
                descriptor = self._descriptor  # also what a short transfer has left unaligned
                continue
            if done <= 0:
                if call is os.preadv:
                    check_size(self._descriptor, self.path, offset, len(memory))
                raise OSError(errno.EIO, f"nothing was transferred at byte {offset + at}")
            at += done
