"""The state of one attached ZeRO-3 optimizer: its transfer, what was prepared, and the copies in flight."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import TransferConfig
from ..errors import VerificationError, run_all
from ..in_flight import InFlightCopy
from ..interface import HostToDeviceTransfer
from ..memory import own_memory
from .plan import StepPlan
from .stage3 import Stage3
from .swap_buffers import SwapBuffers

logger = logging.getLogger("transfer")


@dataclass(eq=False)
class Attachment:
    """One optimizer's attachment.

    Attributes:
        transfer: Makes the copies.
        config: The configuration of a transfer that was built for this attachment, and is closed on detach; else None.
        by_install: Whether ``install`` attached it.
        engine: The DeepSpeed engine where it is known, for its monitor.
        plan: The plan of the step that is under way; None between steps.
    """

    transfer: HostToDeviceTransfer
    config: TransferConfig | None = None
    by_install: bool = False
    engine: weakref.ref[Any] | None = None
    plan: StepPlan | None = None
    _in_flight: list[tuple[int, int, InFlightCopy]] = field(default_factory=list)
    _interrupted: bool = False
    _masters: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)  # those that were prepared
    _swap_buffers: SwapBuffers = field(init=False)
    _said: str | None = None

    def __post_init__(self) -> None:
        self._swap_buffers = SwapBuffers(self.transfer)

    @property
    def deferred(self) -> bool:
        """Whether waits may be put off to the end of a step; True for a strategy used alone, which has no such key."""
        return getattr(self.transfer.config, "completion", "deferred") == "deferred"

    def say(self, waits_because: str | None) -> None:
        """Logs why the copy-backs of a step wait at once, unless that was said of the step before."""
        if waits_because is not None and waits_because != self._said:
            logger.info("each copy-back of this ZeRO-3 engine waits at once: %s", waits_because)
        self._said = waits_because

    def partitions(self, stage3: Stage3, sub_group_id: int) -> tuple[Any, Any] | None:
        """The low-precision and the master partition of a copy from host to device; None: DeepSpeed's own code runs.

        A step's plan knows them; outside of a step, the transfer is asked.
        """
        if self.plan is not None:
            return self.plan.partitions(sub_group_id)
        pair = stage3.partitions(sub_group_id)
        return pair if pair is not None and self.transfer.is_host_to_device(*pair) else None

    def take_in(self, stage3: Stage3, sub_group_id: int) -> None:
        """Moves a master that will be page-locked into memory that cannot be freed meanwhile (``own_memory``)."""
        pair = self.partitions(stage3, sub_group_id)
        if pair is None or stage3.overrides_step or stage3.is_swapped(sub_group_id):
            return
        if self.transfer.would_page_lock(pair[1]):
            del pair  # a second view of the master
            own_memory.move(stage3.master(sub_group_id))

    def prepare(self, stage3: Stage3, sub_group_id: int, master: Any) -> None:
        """Prepares the memory that the copy-backs of a sub-group read: the master, or DeepSpeed's swap buffers.

        Called for every copy-back: the transfer alone knows what it holds, and may have been closed or refused before.
        """
        if stage3.overrides_step:
            return  # such an optimizer moves its masters, and page-locked memory must not move
        if stage3.is_swapped(sub_group_id):
            self._swap_buffers.prepare(stage3)
            return
        storage, before = master.untyped_storage(), self._masters.get(sub_group_id)
        if before is None or before() is not storage:
            self._masters[sub_group_id] = weakref.ref(storage)  # first, so that an interrupt leaves none behind
            if before is not None:
                self._unprepare(before)
        self.transfer.prepare(master)

    def unprepare(self) -> None:
        """Undoes ``prepare`` for every master and buffer."""
        masters, self._masters = self._masters, {}
        run_all(
            [self._swap_buffers.unprepare, *(functools.partial(self._unprepare, each) for each in masters.values())]
        )

    def _unprepare(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        """For a storage that was a master's, unless it is another one's still."""
        storage = reference()
        if storage is not None and all(other() is not storage for other in self._masters.values()):
            self.transfer.unprepare(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))

    def submit(self, sub_group_id: int, destination: Any, source: Any, offset: int = 0) -> None:
        """Starts a copy that ``finish`` waits for, to the part of a partition that begins at element ``offset``."""
        self._interrupted = True  # until the copy is in the list
        self._in_flight.append((sub_group_id, offset, self.transfer.submit(destination, source)))
        self._interrupted = False

    def copy(self, sub_group_id: int, destination: Any, source: Any) -> None:
        """Makes a copy; blocks until the destination holds the values."""
        try:
            self.transfer.copy(destination, source)
        except VerificationError as error:
            raise error.in_sub_group(sub_group_id, 0) from None

    def release_source(self, sub_group_id: int) -> None:
        """Blocks until no copy reads the master of this sub-group."""
        for owner, _, copy in tuple(self._in_flight):
            if owner == sub_group_id:
                copy.release_source()

    def finish(self) -> None:
        """Blocks until every copy that was submitted is finished.

        Raises:
            Exception: The first error of a wait; every other copy has been waited for.
            VerificationError: As these, and names the sub-group.
        """
        if self._interrupted:  # there may be a copy that is not in the list
            self.transfer.drain()
            self._interrupted = False
        run_all([functools.partial(_wait, *each) for each in self._in_flight])
        self._in_flight.clear()

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Calls ``finish`` at the end of the block, also after an error, which then wins over one of ``finish``."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self.finish()
            raise
        self.finish()

    def give_up(self, *, close: bool = False) -> None:
        """Waits for what is in flight and gives back what was prepared.

        A transfer that was built for this attachment is closed; with ``close``, so is a caller's.

        Raises:
            Exception: The first error of these; each of them has been tried.
        """
        closes = [self.transfer.close] if close or self.config is not None else []
        run_all([self.finish, *closes, self.unprepare])


def _wait(sub_group_id: int, offset: int, copy: InFlightCopy) -> None:
    try:
        copy.wait()
    except VerificationError as error:
        raise error.in_sub_group(sub_group_id, offset) from None
