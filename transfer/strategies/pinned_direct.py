"""``pinned_direct``: the device reads the page-locked source itself and casts what arrives."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS
from accelerators.protocol import MapsHostMemory

from ..accelerator_choice import check_capture
from ..errors import StrategyUnavailableError, TransferBusyError
from ..in_flight import InFlightCopy
from ..memory import host_budget, page_locks
from ..memory.chunks import paired_chunks
from ..memory.holdings import Holdings
from ..memory.owned_locks import LeavingLock, OwnedLocks
from ..memory.scratch_ring import ScratchRing
from ..schema.fields import BufferCount, Elements, Flag, SizeBytes
from ..schema.model import StrategyConfig
from .buffered import BufferedTransfer

NOT_PAGE_LOCKED = "The source is not page-locked"
#: The reason that ``prepare`` would remove; the policy stages such a copy without a warning.
UNPREPARED = f"{NOT_PAGE_LOCKED}: `prepare(source)` does that once, in place."


class PinnedDirectConfig(StrategyConfig):
    """The section ``pinned_direct``.

    Attributes:
        mapped: Used by ``submit``, on accelerators that map host memory (``Capabilities.maps_host_memory``): one
            kernel reads the source where it is and casts it, with next to nothing for the host to do and no scratch.
            ``copy`` uses chunks, which are 5% faster. False: chunks always.
        chunk_elements: Elements in each scratch buffer on the device.
        buffers: Scratch buffers, each with a stream. With two, one is cast from while the other fills.
        page_lock: Whether ``prepare`` page-locks sources in place. False: only sources that the
            device can read already go directly, and copies of other code mean what they did (see ``prepare``).
        max_page_locked: The most bytes that this process page-locks. None: half of all memory of the host, or of the
            process's control group, divided by the local ranks, less what others keep locked.
    """

    mapped: Flag = True
    chunk_elements: Elements = 2**22
    buffers: BufferCount = 2
    page_lock: Flag = True
    max_page_locked: SizeBytes = None

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of device memory that casts from sources of ``dtype`` take on one device."""
        return self.chunk_elements * self.buffers * dtype.itemsize

    def page_lock_budget_bytes(self) -> int | None:
        """The most bytes to page-lock, as things are now; None where the system does not tell."""
        if self.max_page_locked is not None:
            return self.max_page_locked
        return host_budget.page_lock_budget_bytes()


class PinnedDirectTransfer(BufferedTransfer):
    """The device reads the source itself and casts it; the host only queues the work.

    The source must be contiguous and readable by the device: pinned when it was made, or page-locked in place by
    ``prepare``, which blocks for 50 to 300 ms a GiB, once for each storage however many views of it are
    prepared. The page-lock is given back when the storage is freed, by ``unprepare`` and by ``close``. A tensor whose
    storage was replaced since is a new source.

    Where the accelerator maps host memory, ``submit`` lets one kernel read and cast all of it. Otherwise, and in
    ``copy``, chunks are copied as they are into device scratch and cast there: ``Config.scratch_bytes(source.dtype)``
    of device memory for each device and source dtype.

    Reads the source until ``wait`` or ``release_source`` has returned; until then the copy keeps source
    and destination alive. ``submit`` does not block. Threads take turns.
    """

    name = "pinned_direct"
    Config = PinnedDirectConfig
    config: PinnedDirectConfig

    @property
    def page_locked_bytes(self) -> int:
        return self._held.total("page_locked_bytes")

    def why_not(self, destination: Tensor, source: Any) -> str | None:
        problem = super().why_not(destination, source)
        if problem is not None:
            return problem
        accelerator = self.accelerator
        if not accelerator.on_host(source):  # a plain copy, which every strategy makes
            return None
        if not source.is_contiguous() or source.is_neg() or source.data_ptr() % source.element_size():
            return "The source is not contiguous and aligned memory with the values themselves."
        missing = accelerator.capabilities.why_not("streams", "events")
        if missing is not None or page_locks.find(accelerator, source) is not None or accelerator.is_pinned(source):
            return missing
        if not self.config.page_lock:
            return f"{NOT_PAGE_LOCKED}, and `pinned_direct.page_lock` is false."
        return accelerator.capabilities.why_not("registers_host_memory") or UNPREPARED

    def prepare(self, source: Tensor) -> None:
        super().prepare(source)
        self._check_process()
        accelerator = self.accelerator
        if not self.config.page_lock or source.numel() == 0 or not accelerator.on_host(source):
            return
        with self._lock:
            if self._busy:  # in the middle of a copy of this thread: the hint is dropped
                return
            self._take_turn(self._prepare, accelerator, source)

    def _prepare(self, accelerator: Accelerator, source: Tensor) -> None:
        locks = self._locks()
        if page_locks.joined(accelerator, source, locks) is None:
            self._page_lock(accelerator, source, locks)

    def would_page_lock(self, source: Tensor) -> bool:
        accelerator, wanted = self.accelerator, source.untyped_storage().nbytes()
        if not self.config.page_lock or not accelerator.on_host(source) or accelerator.is_pinned(source):
            return False
        budget = self.config.page_lock_budget_bytes()
        fits = budget is None or page_locks.locked_bytes() + wanted <= budget
        return fits and accelerator.capabilities.why_not("registers_host_memory", "streams", "events") is None

    def unprepare(self, source: Tensor) -> None:
        super().unprepare(source)
        if self._is_forked:
            return
        if self._accelerator is not None and self.page_locked_bytes:
            check_capture(self._accelerator, None)
        with self._lock:
            for locks in self._held.of(OwnedLocks):
                for lock in page_locks.over(self._accelerator, source):
                    key = ("leaving", lock)
                    if page_locks.drop(lock, locks, source.untyped_storage()) and key not in self._held.requested:
                        self._held.get(key, functools.partial(LeavingLock, lock, locks))
                        self._held.request_close(key)
            self._close_requested()

    def _page_lock(self, accelerator: Accelerator, source: Tensor, owner: OwnedLocks) -> None:
        """Page-locks the source's storage, within the budget, unless it is pinned already."""
        check_capture(accelerator, None)
        wanted = source.untyped_storage().nbytes()
        obstacle = accelerator.capabilities.why_not("registers_host_memory", "streams", "events")
        if obstacle is not None:
            if accelerator.is_pinned(source):
                return
            raise StrategyUnavailableError(f"pinned_direct cannot page-lock {wanted} bytes in place. {obstacle}")
        budget = self.config.page_lock_budget_bytes()
        try:
            page_locks.page_lock(accelerator, source, owner, budget)
        except page_locks.OverBudgetError as error:
            raise StrategyUnavailableError(
                f"{error}, would pass the {budget} bytes that `pinned_direct.max_page_locked` allows. Raise it if the "
                "host has the memory."
            ) from None
        except TransferBusyError:
            raise
        except REFUSALS as error:
            raise StrategyUnavailableError(
                f"page-locking {wanted} bytes in place failed: {error}. Allow this process more locked memory, or set "
                "`pinned_direct.page_lock: false`."
            ) from error

    def _submit(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        return self._take_turn(self._send, destination, source, bool(self.config.mapped))

    def _submit_for_copy(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        return self._take_turn(self._send, destination, source, False)

    def _send(self, destination: Tensor, source: Tensor, mapped: bool) -> InFlightCopy:
        accelerator = self._accelerator
        locks = self._locks()
        lock = page_locks.joined(accelerator, source, locks)
        if lock is not None:
            lock.devices.add(destination.device.index)
        elif page_locks.give_back_stale(accelerator, source) and not accelerator.is_pinned(source):
            raise StrategyUnavailableError(f"{NOT_PAGE_LOCKED} any more: its memory was another tensor's.")
        # Foreign pinned memory may be only partly pinned. The copy engine reports that as an error; a kernel would
        # poison the context.
        view = _mapped_view(accelerator, destination, source) if mapped and lock is not None else None
        ring = self._ring(destination, source.dtype)
        if view is not None:
            chunks = [(destination, view)]
        else:
            chunks = list(paired_chunks(destination, source, self.config.chunk_elements))
            if destination.dtype != source.dtype or not destination.is_contiguous():
                self._allocate(ring, source.dtype)
        ring.begin()
        for target, values in chunks:
            ring.send(target, values)
        # The source as the device addresses it lives as long as the copy too.
        return ring.finish(destination, (source, chunks))

    def _locks(self) -> OwnedLocks:
        return self._held.get("page locks", functools.partial(OwnedLocks, functools.partial(_settle, self._held)))

    def _ring(self, destination: Tensor, dtype: torch.dtype) -> ScratchRing:
        accelerator, config, index = self._accelerator, self.config, destination.device.index

        def make() -> ScratchRing:
            return ScratchRing(accelerator, dtype, config.chunk_elements, config.buffers, index, self._counters)

        return self._held.get((destination.device, dtype), make)

    def _allocate(self, ring: ScratchRing, dtype: torch.dtype) -> None:
        error = ring.allocate()
        if error is not None:
            raise StrategyUnavailableError(
                f"{self.config.scratch_bytes(dtype)} bytes of device scratch are refused: {error}. Lower "
                "`pinned_direct.chunk_elements`."
            ) from error


def _mapped_view(accelerator: Accelerator, destination: Tensor, source: Tensor) -> Tensor | None:
    """The source as the destination's device addresses it, for a copy that casts, or None."""
    if destination.dtype == source.dtype or not accelerator.capabilities.maps_host_memory:
        return None
    view = cast(MapsHostMemory, accelerator).device_view(source)
    return view if view.device == destination.device and view.data_ptr() == source.data_ptr() else None


def _settle(held: Holdings) -> None:
    """Waits for every copy that reads a source."""
    for ring in held.of(ScratchRing):
        ring.settle(wait=True)
