"""What belongs to one attached ZeRO-3 optimizer: its transfer, and the copy-backs nobody has waited for."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any

from .config import TransferConfig
from .in_flight import InFlightCopy
from .interface import HostToDeviceTransfer


@dataclass(eq=False)
class Attachment:
    """One optimizer's attachment.

    Attributes:
        transfer: Makes the copies.
        config: Of a transfer that was built for this attachment, and is closed on detach; else None.
        by_install: Whether ``install`` attached it.
        engine: The DeepSpeed engine where it is known, for its monitor.
        in_step: Whether the optimizer's step is under way, at whose end every copy is waited for.
        updates: Sub-groups that the CPU optimizer has updated in this step.
        tiled: The sub-group whose copy-back was submitted while it was updated, or None.
    """

    transfer: HostToDeviceTransfer
    config: TransferConfig | None = None
    by_install: bool = False
    engine: weakref.ref[Any] | None = None
    in_step: bool = False
    updates: int = 0
    tiled: int | None = None
    _in_flight: list[tuple[int, InFlightCopy]] = field(default_factory=list)
    _prepared: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    @property
    def deferred(self) -> bool:
        """Whether waits may be put off to the end of a step; so they are for a strategy on its own."""
        return getattr(self.transfer.config, "completion", "deferred") == "deferred"

    def prepare(self, optimizer: Any, sub_group_id: int) -> None:
        """Prepares a master partition, once for each storage that it is given."""
        if getattr(optimizer, "swap_optimizer", False):
            return  # a master on NVMe passes through buffers that belong to others
        source = optimizer.fp32_partitioned_groups_flat[sub_group_id].data
        storage = source.untyped_storage()
        known = self._prepared.get(sub_group_id)
        if known is None or known() is not storage:
            self.transfer.prepare(source)
            self._prepared[sub_group_id] = weakref.ref(storage)

    def unprepare(self, optimizer: Any) -> None:
        """Undoes ``prepare`` for every master."""
        for sub_group_id in tuple(self._prepared):
            self.transfer.unprepare(optimizer.fp32_partitioned_groups_flat[sub_group_id].data)
            del self._prepared[sub_group_id]

    def submit(self, sub_group_id: int, destination: Any, source: Any) -> None:
        """Starts a copy that ``finish`` waits for."""
        self._in_flight.append((sub_group_id, self.transfer.submit(destination, source)))

    def release_source(self, sub_group_id: int) -> None:
        """Blocks until no copy reads the master of this sub-group."""
        for owner, copy in tuple(self._in_flight):
            if owner == sub_group_id:
                copy.release_source()

    def finish(self) -> None:
        """Blocks until every copy that was submitted is finished.

        Raises:
            Exception: The first error that waiting met; every other copy has been waited for.
        """
        with contextlib.ExitStack() as waiting:  # all of them, and the first error after
            for entry in reversed(self._in_flight):
                waiting.callback(entry[1].wait)
        self._in_flight.clear()


def crosses(optimizer: Any, sub_group_id: int, transfer: HostToDeviceTransfer) -> bool:
    """Whether this sub-group's copy-back is one that the interface is for."""
    destination = optimizer.fp16_partitioned_groups_flat[sub_group_id]
    source = optimizer.fp32_partitioned_groups_flat[sub_group_id]
    if destination is None or getattr(optimizer, "offload_param", False):  # on NVMe, or on the host
        return False
    if destination.numel() and destination.data_ptr() == source.data_ptr():  # autocast: one and the same
        return False
    return transfer.is_host_to_device(destination.data, source.data)
