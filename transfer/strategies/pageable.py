"""``pageable``: the copy that torch does by itself."""

from __future__ import annotations

from torch import Tensor

from ..in_flight import InFlightCopy, finished_copy
from ..interface import HostToDeviceTransfer


class PageableTransfer(HostToDeviceTransfer):
    """``destination.copy_(source)`` on the current stream; the host waits until it is done.

    The reference that every other strategy must equal, and the one that works everywhere. For a
    source that is not pinned or has another dtype, torch casts into a host temporary of the whole
    destination and copies that without overlap.

    Pins nothing. Reads the source during ``submit``, which blocks until the copy is done.
    """

    name = "pageable"

    def _submit(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        return finished_copy(self.accelerator, destination, source, self._counters)
