"""The buffers that ZeRO-3's optimizer state on NVMe passes through.

DeepSpeed reads a sub-group into its swap buffers, lets the optimizer update it there, and writes it back.
The copy-back reads them. They live as long as the swapper, so page-locking them pays off.
From DeepSpeed 0.19.4 on they are locked, but not registered with the device.
"""

from __future__ import annotations

import _thread
import functools
import weakref
from typing import Any

from ...errors import run_all
from ...interface import HostToDeviceTransfer
from ..stage3 import Stage3, buffers_of


class SwapBuffers:
    """The swap buffers of one optimizer, prepared for each manager that owns them.

    From DeepSpeed 0.19.4 on, a manager that dies frees the memory under its tensors, although other objects hold them.
    A registration that outlives its memory delivers old bytes. So the manager is kept alive until its buffers are given
    back, at the latest when the optimizer dies.
    """

    def __init__(self, transfer: HostToDeviceTransfer) -> None:
        self._transfer = transfer
        self._manager: Any = None
        self._give_back: weakref.finalize[Any, Any] | None = None

    def prepare(self, stage3: Stage3) -> None:
        """Prepares every buffer; gives those of an earlier manager back."""
        manager = stage3.buffer_manager
        if manager is not self._manager:
            self.unprepare()
            # Before the first `prepare`, so that an interrupt leaves none behind. Not at exit: copies may be in flight.
            self._give_back = weakref.finalize(stage3.optimizer, _give_back_elsewhere, self._transfer, manager)
            self._give_back.atexit = False
            self._manager = manager
        for buffer in buffers_of(manager) if manager is not None else ():
            self._transfer.prepare(buffer)

    def unprepare(self) -> None:
        """Gives every buffer back. Idempotent."""
        finalizer, self._give_back = self._give_back, None
        manager, self._manager = self._manager, None
        if finalizer is not None:
            finalizer.detach()
            _give_back(self._transfer, manager)


def _give_back(transfer: HostToDeviceTransfer, manager: Any) -> None:
    if manager is not None:
        run_all([functools.partial(transfer.unprepare, buffer) for buffer in buffers_of(manager)])


def _give_back_elsewhere(transfer: HostToDeviceTransfer, manager: Any) -> None:
    """Gives the buffers back in another thread, as a finalizer may run in the middle of anything.

    It waits a moment, so that all is given back when a program has dropped an engine; but not for a thread that holds
    the transfer and may want what this one holds.
    """
    arguments = [transfer, manager]
    del transfer, manager
    done = _thread.allocate_lock()
    done.acquire()

    def work() -> None:
        try:
            _give_back(*arguments)
        finally:
            arguments.clear()  # the manager dies here, and not a moment after
            done.release()

    _thread.start_new_thread(work, ())  # `threading` takes locks of its own
    done.acquire(timeout=1)
