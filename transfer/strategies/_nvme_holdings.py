"""What ``nvme_swapped`` holds: pinned rings, lanes, memory to read into, and threads that read."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from accelerators import Accelerator

from ..memory.scratch_ring import ScratchLanes
from ..memory.staging_ring import StagingRing
from ._nvme_routes import HostMemory


class NvmeHoldings:
    """Made empty; filled by the first copy that needs it, emptied by ``release`` after ``mark``."""

    def __init__(self) -> None:
        self.rings: dict[tuple[int, torch.device], StagingRing] = {}
        self.lanes: dict[tuple[int, torch.device, torch.dtype], ScratchLanes] = {}
        self.host_memory: HostMemory | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
        self._closing = False

    @property
    def pinned_bytes(self) -> int:
        return sum(ring.pinned_bytes for ring in tuple(self.rings.values()))

    @property
    def scratch_bytes(self) -> int:
        return sum(lanes.scratch_bytes for lanes in tuple(self.lanes.values()))

    def pool(self, threads: int) -> ThreadPoolExecutor:
        """The threads that read."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="h2d-read")
            self._pool_process = os.getpid()
        return self._pool

    def ring(self, accelerator: Accelerator, device: torch.device, capacity: int, buffers: int) -> StagingRing:
        """The pinned memory for one device.

        Raises:
            Exception: What pinning it raises. Nothing new is held then, or what could not be given back yet.
        """
        key = (id(accelerator), device)
        ring = self.rings.get(key)
        if ring is not None and not ring.closing:
            return ring
        self._drop_ring(key)  # of a close that came inside the copy which asks for this one
        ring = self.rings[key] = StagingRing(accelerator, torch.uint8, capacity, device.index)
        try:
            ring.pin(buffers)
        except BaseException:
            ring.closing = True
            with contextlib.suppress(Exception):  # what stays pinned, the next close tries again
                self._drop_ring(key)
            raise
        return ring

    def _drop_ring(self, key: tuple[int, torch.device]) -> None:
        ring = self.rings.get(key)
        if ring is not None:
            ring.close()
            del self.rings[key]

    def mark(self) -> None:
        self._closing = True
        for ring in tuple(self.rings.values()):
            ring.closing = True

    def release(self) -> None:
        if not self._closing and not any(ring.closing for ring in tuple(self.rings.values())):
            return
        for key, ring in tuple(self.rings.items()):  # whose guards are after everything on the lanes
            if ring.is_ours:
                self._drop_ring(key)
            self.rings.pop(key, None)
        for lanes_key, lanes in tuple(self.lanes.items()):
            if lanes.is_ours:
                lanes.close()
            self.lanes.pop(lanes_key, None)
        pool, self._pool = self._pool, None
        if pool is not None and self._pool_process == os.getpid():
            pool.shutdown()
        self.host_memory = None
        self._closing = False
