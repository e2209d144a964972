"""``pinned_staged``: cast on the host into a ring of pinned buffers, copy from there."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator, AcceleratorError

from ..accelerator_choice import accelerator_errors
from ..chunks import paired_chunks
from ..config_fields import BufferCount, Elements
from ..errors import FallbackWarning, PinnedMemoryWarning, StrategyUnavailableError
from ..in_flight import EventCopy, InFlightCopy
from ..interface import HostToDeviceTransfer
from ..staging_ring import StagingRing
from ..strategy_config import StrategyConfig
from ..warn import warn_caller
from .pageable import PageableTransfer

#: What pinning may raise when it is refused: torch's errors, the system's, and a vendor's.
_REFUSALS = (RuntimeError, MemoryError, OSError, AcceleratorError)

#: A ring for each accelerator (by identity; the ring keeps it alive), device and dtype.
_Rings = dict[tuple[int, torch.device, torch.dtype], StagingRing]


class PinnedStagedConfig(StrategyConfig):
    """The section ``pinned_staged``.

    Attributes:
        chunk_elements: Elements in each staging buffer. A power of two wastes no memory where the
            accelerator rounds pinned memory up to one.
        buffers: Staging buffers in the ring. With two, one is filled while the other is copied from.
    """

    chunk_elements: Elements = 2**24
    buffers: BufferCount = 2

    def pinned_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that the ring for destinations of ``dtype`` on one device pins."""
        return self.chunk_elements * self.buffers * dtype.itemsize


class PinnedStagedTransfer(HostToDeviceTransfer):
    """Casts chunk after chunk into pinned staging buffers on the host while earlier ones are copied.

    The cast is the host's own, so the bits are those of a blocking copy. Each buffer is written
    again only after the event of the copy that read it.

    Pins ``Config.pinned_bytes(dtype)`` for each dtype and device of the destinations it has seen,
    at the first copy to them. Source access: during ``submit``. ``submit`` blocks while the host
    casts and for buffers in use; the last ``buffers`` chunks are in flight when it returns. Copies
    that do not cross from the host to the device use ``pageable``. Threads take turns; a submit from
    inside another one of the same thread (a signal handler, a finalizer) uses ``pageable``.

    Where pinning is refused, or the accelerator has no events or nothing to pin, ``pageable`` stands in
    for the rest of this object's life after one ``FallbackWarning``; with ``fallback=False`` each
    submit raises ``StrategyUnavailableError``.
    """

    Config = PinnedStagedConfig
    config: PinnedStagedConfig

    def __init__(
        self,
        config: PinnedStagedConfig | Mapping[str, Any] | None = None,
        accelerator: Accelerator | str | None = None,
        *,
        fallback: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(config, accelerator, fallback=fallback, **options)
        self._pageable = PageableTransfer(accelerator=accelerator)
        self._lock = threading.RLock()
        self._rings: _Rings = {}
        self._busy = False  # a submit or close is under way in the thread that holds the lock
        self._refused_by: Accelerator | None = None
        self._refusal = ""
        # Runs when this object is dropped, and at exit while the accelerator still works.
        weakref.finalize(self, _close_all, self._rings)

    @property
    def pinned_bytes(self) -> int:
        return sum(ring.pinned_bytes for ring in tuple(self._rings.values()))

    def close(self) -> None:
        if self._is_forked:  # another thread of the parent may have held the lock
            return
        with self._lock:
            for ring in list(self._rings.values()):
                ring.closing = True
            if self._busy:  # inside a submit or close of this thread, which closes what is marked before it ends
                return
            try:
                self._busy = True
                with accelerator_errors():
                    _close_marked(self._rings)
            finally:
                self._busy = False

    def _submit(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        accelerator = self.accelerator
        if not (accelerator.on_device(destination) and accelerator.on_host(source)):
            return self._pageable._submit(destination, source)
        with self._lock:
            if self._busy:
                return self._pageable._submit(destination, source)
            try:
                self._busy = True
                ring = self._ring(accelerator, destination)
                if ring is not None:
                    copy = self._stage(accelerator, ring, destination, source)
                else:
                    copy = self._pageable._submit(destination, source)
                _close_marked(self._rings)
                return copy
            except BaseException:
                with contextlib.suppress(Exception):  # what stays pinned, the next close tries again
                    _close_marked(self._rings)
                raise
            finally:
                self._busy = False

    def _stage(self, accelerator: Accelerator, ring: StagingRing, destination: Tensor, source: Tensor) -> InFlightCopy:
        event: Any = None
        # Entering the stream makes the destination's device current, so that events belong to it.
        stream = accelerator.current_stream(destination.device.index)
        with ring.session(), accelerator.stream(stream):
            for target, piece in paired_chunks(destination, source, self.config.chunk_elements):
                buffer = ring.acquire()
                staged = buffer.memory.narrow(0, 0, piece.numel()).view(piece.shape)
                staged.copy_(piece)
                accelerator.enqueue_copy(target, staged)
                event = accelerator.Event()  # type: ignore[misc]  # not None: _ring has checked
                event.record()
                buffer.guard(event)
        return EventCopy(event, destination)

    def _ring(self, accelerator: Accelerator, destination: Tensor) -> StagingRing | None:
        """The ring for this destination, or None where ``pageable`` stands in."""
        key = (id(accelerator), destination.device, destination.dtype)
        ring = self._rings.get(key)
        if ring is not None and not ring.closing:
            return ring
        _close_marked(self._rings)  # where an earlier close was interrupted
        if self._refused_by is accelerator:
            self._require_fallback()
            return None
        obstacle = accelerator.capabilities.why_not("events", "pins_host_memory")
        if obstacle is not None:
            self._refuse(accelerator, destination.dtype, obstacle, None)
            return None
        ring = StagingRing(accelerator, destination.dtype, self.config.chunk_elements, destination.device.index)
        self._rings[key] = ring
        try:
            ring.pin(self.config.buffers)
        except BaseException as error:
            ring.closing = True
            with contextlib.suppress(Exception):  # as above
                _close_marked(self._rings)
            if isinstance(error, _REFUSALS):
                self._refuse(accelerator, destination.dtype, f"Pinning them failed: {error}.", error)
                return None
            raise
        self._warn_of_rounding(accelerator, destination.dtype)
        return ring

    def _refuse(self, accelerator: Accelerator, dtype: torch.dtype, reason: str, cause: BaseException | None) -> None:
        """Remembers why nothing can be staged here; warns, or raises where there is no fallback."""
        remedy = (
            "Allow this process more locked memory (`ulimit -l`, or the container's memlock setting) or lower "
            "`pinned_staged.chunk_elements`."
            if cause is not None
            else "Choose `strategy: pageable` to avoid this message."
        )
        self._refused_by = accelerator
        self._refusal = (
            f"pinned_staged needs {self.config.pinned_bytes(dtype)} bytes of pinned memory on {accelerator.name} "
            f"({self.config.buffers} buffers of {self.config.chunk_elements} {dtype} elements). {reason} {remedy}"
        )
        self._require_fallback(cause)
        warn_caller(
            f"{self._refusal} This transfer now uses `pageable`, several times slower unless the accelerator is the "
            "host itself; `fallback: false` makes this an error.",
            FallbackWarning,
        )

    def _require_fallback(self, cause: BaseException | None = None) -> None:
        if not self.fallback:
            raise StrategyUnavailableError(self._refusal) from cause

    def _warn_of_rounding(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        wanted = self.config.chunk_elements * dtype.itemsize
        taken = 1 << (wanted - 1).bit_length()
        if accelerator.capabilities.pin_rounds_to_power_of_two and taken - wanted > 2**20:
            warn_caller(
                f"each staging buffer of {wanted} bytes really takes {taken}, because pinned memory is rounded up to "
                f"a power of two here: set `pinned_staged.chunk_elements` to {taken // dtype.itemsize} or "
                f"{taken // dtype.itemsize // 2}",
                PinnedMemoryWarning,
            )


def _close_marked(rings: _Rings) -> None:
    """Closes and forgets every ring of this process that is marked, also while it is at work."""
    while marked := [(key, ring) for key, ring in list(rings.items()) if ring.closing and ring.is_ours]:
        for key, ring in marked:
            ring.close()
            rings.pop(key, None)


def _close_all(rings: _Rings) -> None:
    for ring in list(rings.values()):
        ring.closing = True
    _close_marked(rings)
