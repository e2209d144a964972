"""``pinned_direct``: the device reads the page-locked source itself and casts what arrives."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ..in_flight import InFlightCopy
from ..interface import HOST_WAITS
from ..memory import page_locks
from ..memory.chunks import cut_at, paired_chunks
from ..memory.host_budget import available_bytes, local_ranks
from ..memory.scratch_ring import ScratchLanes
from ..schema.fields import BufferCount, Elements, Flag, SizeBytes
from ..schema.model import StrategyConfig
from ._direct_holdings import DirectHoldings, mapped_views
from .buffered import ExclusiveTransfer
from .pinned_staged import PinnedStagedTransfer

#: Refusals of different storages after which no other is tried.
_MOST_REFUSALS = 2


class PinnedDirectConfig(StrategyConfig):
    """The section ``pinned_direct``.

    Attributes:
        mapped: Whether the device reads the source where it is and casts it, in a single kernel, on
            accelerators that can (``Capabilities.maps_host_memory``): next to nothing for the host to do, no
            scratch, and 5% slower than chunks, which cross by the copy engine. So ``submit`` does, but not
            ``copy``, in which the host has nothing else to do. False: chunks always.
        chunk_elements: Elements in each scratch buffer on the device, where chunks cross.
        buffers: Scratch buffers, each with a stream. With two, one is cast from while the other fills.
        page_lock: Whether ``prepare`` page-locks sources in place. False: only sources that the
            device can read already go directly.
        max_page_locked: The most bytes that this process page-locks. None: half of the memory that the
            host, or the process's control group, has left, divided by the local ranks.
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
        left = available_bytes()
        return None if left is None else left // 2 // local_ranks()


class PinnedDirectTransfer(ExclusiveTransfer):
    """The device reads the source itself and casts it; the host only queues the work.

    Where the accelerator maps host memory and a cast is needed, one kernel does both, unless the caller
    waits at once (``copy``). Otherwise chunks cross as they are into device scratch and are cast there.

    The source must be readable by the device: pinned when it was made, or page-locked in place by
    ``prepare``, which blocks for 50 to 300 ms a GiB, once for each storage however many views of it are
    prepared. It is given back when the storage is freed, by ``unprepare`` and by ``close``. A tensor
    whose storage was replaced since is a new source.

    Every other source, one that is not contiguous among them, goes to ``pinned_staged``; with
    ``fallback=False`` that raises ``StrategyUnavailableError``. Where ``prepare`` is refused (no capability,
    ``max_page_locked``, the system), or scratch is, a ``FallbackWarning`` says why, once. What does not cross
    from the host to the device is a plain copy.

    Source access: until ``wait`` or ``release_source`` has returned; until then the copy keeps source
    and destination alive. ``submit`` does not block, unless the source has to be staged. Chunks that are cast take
    ``Config.scratch_bytes(source.dtype)`` of device memory for each device and source dtype. Threads take turns; a
    submit from inside another one of the same thread is staged.
    """

    name = "pinned_direct"
    Config = PinnedDirectConfig
    config: PinnedDirectConfig

    def __init__(
        self,
        config: PinnedDirectConfig | Mapping[str, Any] | None = None,
        accelerator: Accelerator | str | None = None,
        *,
        fallback: bool = True,
        **options: Any,
    ) -> None:
        self._held: DirectHoldings = DirectHoldings()
        self._stand_in = PinnedStagedTransfer(accelerator=accelerator, fallback=fallback)
        self._said: set[str] = set()  # which refusals that may pass were warned of already
        self._refusals: list[tuple[weakref.ref[Any], str]] = []  # of a storage
        super().__init__(config, accelerator, fallback=fallback, **options)

    @property
    def pinned_bytes(self) -> int:
        return self.page_locked_bytes + super().pinned_bytes

    @property
    def page_locked_bytes(self) -> int:
        return sum(lock.held_bytes for lock in page_locks.owned_by(self._held.owner))

    @property
    def scratch_bytes(self) -> int:
        return sum(lanes.scratch_bytes for lanes in tuple(self._held.lanes.values()))

    def prepare(self, source: Tensor) -> None:
        self._check_process()
        accelerator = self.accelerator
        if not self.config.page_lock or source.numel() == 0 or not accelerator.on_host(source):
            return
        with self._lock:
            if self._busy:
                return
            try:
                self._busy = True
                self._held.release()  # where an earlier close was interrupted
                if self._readable(accelerator, source):
                    return
                if self._refused_by is accelerator:
                    self._require_fallback(self._refusal)
                    return
                self._page_lock(accelerator, source)
            finally:
                self._busy = False
                with contextlib.suppress(Exception):  # what stays held, the next close tries again
                    self._held.release()

    def unprepare(self, source: Tensor) -> None:
        if self._is_forked:
            return
        with self._lock:
            self._held.leaving += [lock for lock in page_locks.owned_by(self._held.owner) if lock.covers(source)]
            if self._busy:  # inside a submit or close of this thread, which releases what is marked before it ends
                return
            try:
                self._busy = True
                self._held.release()
            finally:
                self._busy = False

    def _page_lock(self, accelerator: Accelerator, source: Tensor) -> None:
        wanted = source.untyped_storage().nbytes()
        obstacle = accelerator.capabilities.why_not("registers_host_memory", "streams", "events")
        if obstacle is not None:
            self._refuse(accelerator, f"pinned_direct cannot page-lock {wanted} bytes in place. {obstacle}")
            return
        held, budget = page_locks.locked_bytes(), self.config.page_lock_budget_bytes()
        if budget is not None and held + wanted > budget:
            refusal = (
                f"page-locking {wanted} bytes in place, beside {held} that are, would pass the {budget} bytes that "
                "`pinned_direct.max_page_locked` allows. Raise it if the host has the memory."
            )
            self._stand_in_once("budget", refusal)
            return
        known = self._refusal_of(source)
        if known is not None:
            self._require_fallback(known)
            return
        try:
            page_locks.page_lock(accelerator, source, self._held.owner)
        except REFUSALS as error:
            remedy = "Allow this process more locked memory, or set `pinned_direct.page_lock: false`."
            refusal = f"page-locking {wanted} bytes in place failed: {error}. {remedy}"
            # It may be this memory alone, such as a read-only file; but not time after time.
            self._refusals.append((weakref.ref(source.untyped_storage()), refusal))
            if len(self._refusals) == _MOST_REFUSALS:
                self._refused_by, self._refusal = accelerator, refusal
            self._stand_in_once("page lock", refusal, error)

    def _refusal_of(self, source: Tensor) -> str | None:
        """Why this source's storage could not be page-locked when that was tried, or None."""
        storage = source.untyped_storage()
        return next((refusal for refused, refusal in self._refusals if refused() is storage), None)

    def _cross(self, accelerator: Accelerator, destination: Tensor, source: Tensor) -> InFlightCopy:
        self._held.release()  # where an earlier close was interrupted
        obstacle = self._obstacle(accelerator, source)
        if obstacle is not None:
            self._require_fallback(f"pinned_direct cannot copy this source. {obstacle}")
            return self._pass_on(self._stand_in, destination, source)
        lanes = self._lanes(accelerator, destination, source)
        chunks = self._chunks(accelerator, destination, source)
        if any(lanes.needs_scratch(*chunk) for chunk in chunks) and not self._allocate(lanes, source):
            return self._pass_on(self._stand_in, destination, source)
        self._counters.add(pieces=len(chunks))
        # The source as the device addresses it lives as long as the copy too.
        copy: InFlightCopy = lanes.cross(chunks, destination, (source, chunks), self._counters)
        return copy

    def _chunks(self, accelerator: Accelerator, destination: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
        lock = page_locks.joined(accelerator, source, self._held.owner)
        cuts = [] if lock is None else lock.cuts(source)
        # Memory that others have pinned may be so in part: the copy engine says so, a kernel would fail for good.
        if lock is not None and self.config.mapped and not HOST_WAITS.get() and destination.dtype != source.dtype:
            views = mapped_views(accelerator, destination, source, cuts)
            if views:
                return views
        chunks = paired_chunks(destination, source, self.config.chunk_elements)
        return list(cut_at(chunks, cuts) if cuts else chunks)

    def _obstacle(self, accelerator: Accelerator, source: Tensor) -> str | None:
        """Why the device cannot read this source as it is, in one sentence, or None."""
        if not source.is_contiguous() or source.is_neg() or source.data_ptr() % source.element_size():
            return "It is not contiguous and aligned memory with the values themselves."
        missing = accelerator.capabilities.why_not("streams", "events")
        if missing is not None or self._readable(accelerator, source):
            return missing
        if self._refused_by is accelerator:
            return self._refusal
        refusal = self._refusal_of(source)
        if refusal is not None:
            return refusal
        return "It is not pinned: call `prepare(source)` once, which page-locks it in place."

    def _readable(self, accelerator: Accelerator, source: Tensor) -> bool:
        """Whether the device can read the source directly, of which ``_held`` has the lock if there is one."""
        if page_locks.joined(accelerator, source, self._held.owner) is not None:
            return True
        for stale in page_locks.stale():  # an address of its may be this source's now
            self._held.settle()
            page_locks.give_back(stale)
        return accelerator.is_pinned(source)

    def _lanes(self, accelerator: Accelerator, destination: Tensor, source: Tensor) -> ScratchLanes:
        key = (id(accelerator), destination.device, source.dtype)
        lanes = self._held.lanes.get(key)
        if lanes is None:
            index = destination.device.index
            lanes = ScratchLanes(accelerator, source.dtype, self.config.chunk_elements, self.config.buffers, index)
            self._held.lanes[key] = lanes
        return lanes

    def _allocate(self, lanes: ScratchLanes, source: Tensor) -> bool:
        """Whether there is device memory for the scratch of these lanes."""
        error = lanes.allocate()
        if error is None:
            return True
        wanted = self.config.scratch_bytes(source.dtype)
        remedy = "Lower `pinned_direct.chunk_elements`."
        self._stand_in_once("scratch", f"{wanted} bytes of device scratch are refused: {error}. {remedy}", error)
        return False

    def _stand_in_once(self, what: str, refusal: str, cause: BaseException | None = None) -> None:
        """As ``_refuse``, for what may be granted the next time."""
        self._require_fallback(refusal, cause)
        if what not in self._said:
            self._said.add(what)
            self._warn_of_stand_in(refusal)
