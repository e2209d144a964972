"""What a reader is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from ..open_swapped import OpenFile


class Reader(ABC):
    """Reads one range of a file at a time, in the calling thread. Threads may share one object."""

    #: What the configuration calls it.
    name: ClassVar[str]

    #: Whether a read that failed is always an error. False: it is used where checksums show that.
    notices_failures: ClassVar[bool] = True

    @abstractmethod
    def read(self, file: OpenFile, offset: int, memory: memoryview, needed: int) -> None:
        """Fills ``memory`` from the file; blocks until it is done.

        Args:
            file: Where from. Where it reads directly, ``offset``, the address and the length of ``memory``
                are aligned.
            offset: Of the first byte.
            memory: Bytes to write to.
            needed: So many of its bytes must come from the file; the rest may lie beyond its end.

        Raises:
            SwapError: The file cannot be read, or ends too early. The memory holds anything then.
        """

    def close(self) -> None:
        """Gives back what the reader holds; it can be used again."""
