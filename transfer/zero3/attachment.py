"""The state of one attached ZeRO-3 optimizer: its transfer, its gradients, what was prepared, the copies in flight."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..config import TransferConfig
from ..errors import VerificationError, run_all
from ..in_flight import InFlightCopy
from ..interface import HostToDeviceTransfer
from ..memory import own_memory
from . import tiles
from .gradients import HostGradients, LazyGradient
from .plan import StepPlan
from .stage3 import GradientState, Stage3
from .swapped.swap_buffers import SwapBuffers
from .swapped.swapped_states import SwappedStates
from .tiles import TileStream

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
        takes_gradients: Whether gradients may go to the host once; a measurement may want them as DeepSpeed has them.
        asked_gradients: Whether it was asked if they may.
        gradients: Those of the optimizer, where they go to the host once; else None.
        stream: Updates masters in memory tile by tile, from the first such update on.
        states: Those of swapped sub-groups, which pass through a step.
        ended_steps: How many steps have come to the point where parameters are gathered.
        is_ending: Whether a step is at that point.
    """

    transfer: HostToDeviceTransfer
    config: TransferConfig | None = None
    by_install: bool = False
    engine: weakref.ref[Any] | None = None
    plan: StepPlan | None = None
    takes_gradients: ClassVar[bool] = True
    asked_gradients: bool = False
    gradients: HostGradients | None = None
    stream: TileStream | None = None
    states: SwappedStates = field(init=False)
    ended_steps: int = 0
    is_ending: bool = False
    _in_flight: list[tuple[int, int, InFlightCopy]] = field(default_factory=list)
    _interrupted: bool = False
    _masters: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)  # those that were prepared
    _swap_buffers: SwapBuffers = field(init=False)
    _said: str | None = None

    def __post_init__(self) -> None:
        self._swap_buffers = SwapBuffers(self.transfer)
        self.states = SwappedStates(self.transfer)

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

    def updating(
        self, stage3: Stage3, sub_group_id: int, submit: Callable[[int, int], None], *, to_device: bool
    ) -> AbstractContextManager[None]:
        """A block in which the update of a master is made in tiles; see ``TileStream.updating``."""
        if self.stream is None:
            self.stream = TileStream(tiles.tile_elements(self.transfer))
        copy_elements = tiles.COPY_ELEMENTS if to_device else 1
        return self.stream.updating(stage3.cpu_optimizer, stage3.master(sub_group_id).data, submit, copy_elements)

    def take_gradients(self, stage3: Stage3, waits_because: str | None) -> None:
        """Lets gradients go to the host once, where that can be; says why not, at level INFO.

        Blocks while DeepSpeed's fp32 buffers are compared with what is accumulated.
        """
        self.asked_gradients = True
        if not self.takes_gradients:
            return
        state = GradientState(stage3)
        why_not = state.why_not_once() or waits_because or self._cannot_carry()
        if why_not is not None:
            self._give_gradients_back()
            if stage3.keeps_masters_in_memory or stage3.swaps:
                logger.info("gradients of this ZeRO-3 engine go to the host in fp32 too: %s", why_not)
        elif self.gradients is None:
            self.gradients = HostGradients(stage3.optimizer, self.transfer)
            try:
                self.gradients.take_over()
            except BaseException:
                self._give_gradients_back()
                raise

    def hold_gradient(self, sub_group_id: int) -> None:
        """Lets DeepSpeed have the fp32 gradient of a sub-group in memory, from now on."""
        if self.gradients is not None:
            self.gradients.hold(sub_group_id)

    def has_lazy_gradient(self, stage3: Stage3, sub_group_id: int) -> bool:
        """Whether a sub-group's fp32 gradient is in no memory."""
        return isinstance(stage3.master(sub_group_id).grad, LazyGradient)

    def inherit(self, before: Attachment) -> None:
        """Takes the gradients of an earlier attachment of the same optimizer."""
        if before.gradients is not None:
            before.gradients.use(self.transfer)
        self.gradients, before.gradients = before.gradients, None

    def _cannot_carry(self) -> str | None:
        needed = self.transfer.accelerator.capabilities.why_not("streams", "events", "copies_asynchronously")
        return None if needed is None else needed.rstrip(".")

    def _give_gradients_back(self) -> None:
        """Lets gradients go to the host as DeepSpeed sends them. Blocks. Idempotent."""
        gradients, self.gradients = self.gradients, None
        if gradients is not None:
            gradients.give_back()

    def prepare(self, stage3: Stage3, sub_group_id: int, master: Any) -> None:
        """Prepares the memory that the copy-backs of a sub-group read: the master, or DeepSpeed's swap buffers.

        Called for every copy-back: the transfer alone knows what it holds, and may have been closed or refused before.
        """
        if stage3.overrides_step and not master.is_shared():
            return  # such an optimizer moves its masters to shared memory, and page-locked memory must not move
        if stage3.is_swapped(sub_group_id):
            self._swap_buffers.prepare(stage3)
            return
        storage, before = master.untyped_storage(), self._masters.get(sub_group_id)
        if before is None or before() is not storage:
            self._masters[sub_group_id] = weakref.ref(storage)  # first, so that an interrupt leaves none behind
            if before is not None:
                self._unprepare(before)
        self.transfer.prepare(master)

    def unprepare_swap_buffers(self) -> None:
        """Undoes ``prepare`` for DeepSpeed's swap buffers. Idempotent."""
        self._swap_buffers.unprepare()

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

    def submit(self, sub_group_id: int, destination: Any, source: Any, offset: int = 0) -> InFlightCopy:
        """Starts a copy that ``finish`` waits for, to the part of a partition that begins at element ``offset``."""
        self._interrupted = True  # until the copy is in the list
        copy = self.transfer.submit(destination, source)
        self._in_flight.append((sub_group_id, offset, copy))
        self._interrupted = False
        return copy

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
        """Waits for what is in flight and gives back what was prepared, and DeepSpeed's gradients.

        A transfer that was built for this attachment is closed; with ``close``, as the optimizer goes, a caller's too.

        Raises:
            Exception: The first error of these; each of them has been tried.
        """
        closes = [self.transfer.close] if close or self.config is not None else []
        if close and self.gradients is not None:
            self.gradients.forget()
            self.gradients = None
        run_all([self.finish, self.states.close, self._give_gradients_back, *closes, self.unprepare])


def _wait(sub_group_id: int, offset: int, copy: InFlightCopy) -> None:
    try:
        copy.wait()
    except VerificationError as error:
        raise error.in_sub_group(sub_group_id, offset) from None
