"""ZeRO-3's optimizer state on NVMe: which sub-groups are there, and the buffers that they pass through.

DeepSpeed reads a sub-group into its swap buffers, lets the optimizer update it there, and writes it back;
the copy-back leaves from there. The buffers live as long as the swapper, so page-locking them pays off.
From DeepSpeed 0.19.4 on they are locked, but not registered with the device.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from ..interface import HostToDeviceTransfer


def is_swapped(optimizer: Any, sub_group_id: int) -> bool:
    """Whether the state of this sub-group lives on NVMe; small ones stay in memory."""
    return bool(getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(sub_group_id))


def buffer_manager(optimizer: Any) -> Any:
    """The owner of the swap buffers, or None."""
    return getattr(getattr(optimizer, "optimizer_swapper", None), "swap_buffer_manager", None)


class SwapBuffers:
    """The swap buffers of one optimizer, prepared once for each manager that owns them.

    From DeepSpeed 0.19.4 on, a manager that dies frees the memory under its tensors, whoever still has them,
    and a registration that outlives its memory delivers old bytes. So the manager is kept alive until its
    buffers were given back, which happens when the optimizer dies, if not before.
    """

    def __init__(self, transfer: HostToDeviceTransfer) -> None:
        self._transfer = transfer
        self._manager: Any = None
        self._give_back: weakref.finalize[Any, Any] | None = None

    def prepare(self, optimizer: Any) -> None:
        """Prepares every buffer, unless that was done for this manager."""
        manager = buffer_manager(optimizer)
        if manager is None or manager is self._manager:
            return
        self.unprepare()
        # Before the first of them, so that an interrupt leaves none behind. Not at exit: copies may be in flight.
        self._give_back = weakref.finalize(optimizer, _unprepare, self._transfer, manager)
        self._give_back.atexit = False
        for buffer in manager.all_buffers:
            self._transfer.prepare(buffer)
        self._manager = manager

    def unprepare(self) -> None:
        """Gives every buffer back. Twice is fine."""
        give_back, self._give_back, self._manager = self._give_back, None, None
        if give_back is not None:
            give_back()


def _unprepare(transfer: HostToDeviceTransfer, manager: Any) -> None:
    with contextlib.ExitStack() as each:  # all of them, and the first error after
        for buffer in manager.all_buffers:
            each.callback(transfer.unprepare, buffer)
