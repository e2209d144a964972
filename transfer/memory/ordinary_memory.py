"""Buffers on the host that are not pinned."""

from __future__ import annotations

from collections import deque

from ..nvme.aligned_memory import aligned_empty
from .staging_ring import StagingBuffer


class OrdinaryMemory:
    """Unpinned buffers, used in turn; a holding. No copy reads a buffer any more when its turn comes.

    Args:
        num_bytes: Bytes of each buffer.
        buffers: Number of buffers.
    """

    def __init__(self, num_bytes: int, buffers: int) -> None:
        self._num_bytes = num_bytes
        self._number = buffers
        self._buffers: deque[StagingBuffer] = deque()

    def open(self) -> None:
        """Allocates the buffers, aligned as drives want them."""
        self._buffers.extend(StagingBuffer(aligned_empty(self._num_bytes)) for _ in range(self._number))

    def acquire(self) -> StagingBuffer:
        """The next buffer."""
        self._buffers.rotate(-1)
        return self._buffers[-1]

    def close(self) -> None:
        """Frees them."""
        self._buffers.clear()
