"""What belongs to one attached ZeRO-3 optimizer: its transfer, and the copy-backs nobody has waited for."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any

from ..config import TransferConfig
from ..in_flight import InFlightCopy
from ..interface import HostToDeviceTransfer
from .swap_buffers import SwapBuffers, is_swapped


@dataclass(eq=False)
class Attachment:
    """One optimizer's attachment.

    Attributes:
        transfer: Makes the copies.
        config: Of a transfer that was built for this attachment, and is closed on detach; else None.
        by_install: Whether ``install`` attached it.
        engine: The DeepSpeed engine where it is known, for its monitor.
        in_step: Whether the optimizer's step is under way, at whose end every copy is waited for.
        tiled: The sub-group whose copy-back was submitted while it was updated, or None.
    """

    transfer: HostToDeviceTransfer
    config: TransferConfig | None = None
    by_install: bool = False
    engine: weakref.ref[Any] | None = None
    in_step: bool = False
    tiled: int | None = None
    _in_flight: list[tuple[int, InFlightCopy]] = field(default_factory=list)
    _interrupted: bool = False
    _prepared: dict[int, tuple[weakref.ref[Any], int]] = field(default_factory=dict)
    _swap_buffers: SwapBuffers = field(init=False)

    def __post_init__(self) -> None:
        self._swap_buffers = SwapBuffers(self.transfer)

    @property
    def deferred(self) -> bool:
        """Whether waits may be put off to the end of a step; so they are for a strategy on its own."""
        return getattr(self.transfer.config, "completion", "deferred") == "deferred"

    def prepare(self, optimizer: Any, sub_group_id: int) -> None:
        """Prepares what a master's copy-backs leave from.

        That is the master itself, once for each storage that it is given, and place where that is; for one on
        NVMe it is DeepSpeed's swap buffers.

        Args:
            optimizer: The optimizer.
            sub_group_id: The master's.
        """
        if has_own_order(optimizer):
            # ZenFlow and SuperOffload move masters into shared memory, under the storage that stays: what is
            # page-locked must not move.
            return
        if is_swapped(optimizer, sub_group_id):
            self._swap_buffers.prepare(optimizer)
            return
        source = optimizer.fp32_partitioned_groups_flat[sub_group_id].data
        storage, address = source.untyped_storage(), source.untyped_storage().data_ptr()
        known = self._prepared.get(sub_group_id)
        if known is None or known[0]() is not storage or known[1] != address:
            self.transfer.prepare(source)
            self._prepared[sub_group_id] = weakref.ref(storage), address

    def unprepare(self, optimizer: Any) -> None:
        """Undoes ``prepare`` for every master and buffer."""
        self._swap_buffers.unprepare()
        for sub_group_id in tuple(self._prepared):
            self.transfer.unprepare(optimizer.fp32_partitioned_groups_flat[sub_group_id].data)
            del self._prepared[sub_group_id]

    def submit(self, sub_group_id: int, destination: Any, source: Any) -> None:
        """Starts a copy that ``finish`` waits for."""
        self._interrupted = True  # until the copy is in the list
        self._in_flight.append((sub_group_id, self.transfer.submit(destination, source)))
        self._interrupted = False

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
        if self._interrupted:  # there may be a copy that nobody knows of
            self.transfer.drain()
            self._interrupted = False
        with contextlib.ExitStack() as waiting:  # all of them, and the first error after
            for entry in reversed(self._in_flight):
                waiting.callback(entry[1].wait)
        self._in_flight.clear()


def has_own_order(optimizer: Any) -> bool:
    """Whether this optimizer's step is not ZeRO-3's: SuperOffload's and ZenFlow's are not."""
    return hasattr(optimizer, "superoffload_cpu_optimizer") or bool(getattr(optimizer, "zenflow", False))


def crosses(optimizer: Any, sub_group_id: int, transfer: HostToDeviceTransfer) -> bool:
    """Whether this sub-group's copy-back is one that the interface is for."""
    if sub_group_id >= len(optimizer.fp16_partitioned_groups_flat):  # offloaded as a whole, by offload_states
        return False
    destination = optimizer.fp16_partitioned_groups_flat[sub_group_id]
    source = optimizer.fp32_partitioned_groups_flat[sub_group_id]
    if destination is None or getattr(optimizer, "offload_param", False):  # on NVMe, or on the host
        return False
    if destination.numel() and destination.data_ptr() == source.data_ptr():  # autocast: one and the same
        return False
    return transfer.is_host_to_device(destination.data, source.data)
