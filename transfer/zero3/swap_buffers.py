"""The buffers that ZeRO-3's optimizer state on NVMe passes through.

DeepSpeed reads a sub-group into its swap buffers, lets the optimizer update it there, and writes it back.
The copy-back reads them. They live as long as the swapper, so page-locking them pays off.
From DeepSpeed 0.19.4 on they are locked, but not registered with the device.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from ..errors import run_all
from ..interface import HostToDeviceTransfer
from .stage3 import Stage3, buffers_of


class SwapBuffers:
    """The swap buffers of one optimizer, prepared once for each manager that owns them.

    From DeepSpeed 0.19.4 on, a manager that dies frees the memory under its tensors, although other objects hold them.
    A registration that outlives its memory delivers old bytes. So the manager is kept alive until its buffers are given
    back, at the latest when the optimizer dies.
    """

    def __init__(self, transfer: HostToDeviceTransfer) -> None:
        self._transfer = transfer
        self._manager: Any = None
        self._give_back: weakref.finalize[Any, Any] | None = None

    def prepare(self, stage3: Stage3) -> None:
        """Prepares every buffer, unless that was done for this manager."""
        manager = stage3.buffer_manager
        if manager is None or manager is self._manager:
            return
        self.unprepare()
        # Before the first `prepare`, so that an interrupt leaves none behind. Not at exit: copies may be in flight.
        self._give_back = weakref.finalize(stage3.optimizer, _unprepare, self._transfer, manager)
        self._give_back.atexit = False
        for buffer in buffers_of(manager):
            self._transfer.prepare(buffer)
        self._manager = manager

    def unprepare(self) -> None:
        """Gives every buffer back. Idempotent."""
        give_back, self._give_back, self._manager = self._give_back, None, None
        if give_back is not None:
            give_back()


def _unprepare(transfer: HostToDeviceTransfer, manager: Any) -> None:
    run_all([functools.partial(transfer.unprepare, buffer) for buffer in buffers_of(manager)])
