"""Values in files: written safely, read fast, and never a wrong bit in between.

::

    from transfer import nvme

    swapped = nvme.swap_out(master, "/local_nvme")  # returns once the values are safe
    transfer.copy(partition, swapped)               # file -> pinned memory -> device, all three at once
    master = nvme.swap_in(swapped)

``file_format`` has the format, ``swap_directory`` each process's directory, ``writing`` writes files, ``open_swapped``
and ``read_ahead`` read them. The strategy that copies them to a device is ``transfer/strategies/nvme_swapped.py``.
"""

from __future__ import annotations

from .reading import swap_in
from .swapped_tensor import SwappedTensor
from .writing import swap_out

__all__ = ["SwappedTensor", "swap_in", "swap_out"]
