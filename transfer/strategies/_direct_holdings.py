"""What ``pinned_direct`` holds, and how it sees a source from the device."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.protocol import MapsHostMemory

from ..memory import page_locks
from ..memory.chunks import cut_at
from ..memory.page_locks import PageLock
from ..memory.scratch_ring import ScratchLanes


def mapped_views(
    accelerator: Accelerator, destination: Tensor, source: Tensor, cuts: list[int]
) -> list[tuple[Tensor, Tensor]] | None:
    """The source as the destination's device addresses it, or None where it does not."""
    if not accelerator.capabilities.maps_host_memory:
        return None
    device_view = cast(MapsHostMemory, accelerator).device_view
    whole = [(destination, source)]
    pairs = list(cut_at(whole, cuts) if cuts else whole)
    views = [(target, device_view(piece)) for target, piece in pairs]
    addressed = zip(views, pairs, strict=True)
    same = all(
        view.device == destination.device and view.data_ptr() == piece.data_ptr() for (_, view), (_, piece) in addressed
    )
    return views if same else None


class DirectHoldings:
    """Lanes for each accelerator, device and source dtype, and the owner's page locks."""

    def __init__(self) -> None:
        self.owner = object()
        self.lanes: dict[tuple[int, torch.device, torch.dtype], ScratchLanes] = {}
        self.leaving: list[PageLock] = []  # to be left once nothing reads them
        self._closing = False

    def settle(self) -> None:
        """Waits for every copy."""
        for lanes in tuple(self.lanes.values()):
            if lanes.is_ours:
                lanes.settle(wait=True)

    def mark(self) -> None:
        self._closing = True

    def release(self) -> None:
        while self.leaving:
            self.settle()
            page_locks.leave(self.leaving[-1], self.owner)
            self.leaving.pop()
        if not self._closing:
            return
        for key, lanes in tuple(self.lanes.items()):
            if lanes.is_ours:
                lanes.close()
            self.lanes.pop(key, None)
        for lock in page_locks.owned_by(self.owner):
            page_locks.leave(lock, self.owner)
        for lock in page_locks.stale():  # what is left of registrations that failed half-way
            if not lock.owners:
                page_locks.give_back(lock)
        self._closing = False
