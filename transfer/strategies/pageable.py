"""``pageable``: the copy that torch does by itself."""

from __future__ import annotations

import time

from torch import Tensor

from ..in_flight import FINISHED, InFlightCopy, finish_stream
from ..interface import HostToDeviceTransfer


class PageableTransfer(HostToDeviceTransfer):
    """``destination.copy_(source)`` on the current stream; the host waits until it is done.

    The reference that every other strategy must equal, and the one that works everywhere: also
    between tensors of one side. For a source that is not pinned or has another dtype, torch casts
    into a host temporary of the whole destination and copies that without overlap.

    Pins nothing. Source access: during ``submit``. ``submit`` blocks until the copy is done.
    """

    name = "pageable"

    def _submit(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        started = time.perf_counter()
        accelerator = self.accelerator
        stream = accelerator.current_stream(destination.device.index)
        with accelerator.stream(stream):
            accelerator.enqueue_copy(destination, source)
        finish_stream(accelerator, stream, destination.device.index)
        self._counters.add(pieces=1, wait_seconds=time.perf_counter() - started)
        return FINISHED
