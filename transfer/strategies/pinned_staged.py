"""``pinned_staged``: cast on the host into a ring of pinned buffers, copy from there."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator, AcceleratorError

from ..chunks import paired_chunks
from ..errors import FallbackWarning, PinnedMemoryWarning, StrategyUnavailableError
from ..in_flight import EventCopy, InFlightCopy
from ..interface import HostToDeviceTransfer
from ..sizes import BufferCount, Elements
from ..strategy_config import StrategyConfig
from .pageable import PageableTransfer
from .staging import StagingRing

#: What pinning may raise when it is refused: torch's errors, the system's, and a vendor's.
_REFUSALS = (RuntimeError, MemoryError, OSError, AcceleratorError)

_Rings = dict[tuple[torch.device, torch.dtype], StagingRing]


class PinnedStagedConfig(StrategyConfig):
    """The section ``pinned_staged``.

    Attributes:
        chunk_elements: Elements in each staging buffer. A power of two wastes no memory where the
            accelerator rounds pinned memory up to one.
        buffers: Staging buffers in the ring.
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
    that do not cross from the host to the device take the ``pageable`` way. Threads take turns.

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
        self._refusal: str | None = None
        # Runs when this object is dropped, and at exit while the accelerator still works.
        weakref.finalize(self, _close_rings, self._rings)

    @property
    def pinned_bytes(self) -> int:
        return sum(ring.pinned_bytes for ring in self._rings.values())

    def close(self) -> None:
        if self._is_forked:  # another thread of the parent may have held the lock
            return
        with self._lock:
            _close_rings(self._rings)

    def _submit(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        if not self.is_host_to_device(destination, source):
            return self._pageable._submit(destination, source)
        with self._lock:
            ring = self._ring(destination)
            if ring is None:
                return self._pageable._submit(destination, source)
            return self._stage(ring, destination, source)

    def _stage(self, ring: StagingRing, destination: Tensor, source: Tensor) -> InFlightCopy:
        accelerator = self.accelerator
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

    def _ring(self, destination: Tensor) -> StagingRing | None:
        """The ring for this destination, or None where ``pageable`` stands in."""
        key = (destination.device, destination.dtype)
        if key in self._rings:
            return self._rings[key]
        accelerator = self.accelerator
        if self._refusal is None:
            wanted = self.config.pinned_bytes(destination.dtype)
            what = (
                f"pinned_staged needs {wanted} bytes of pinned memory on {accelerator.name} "
                f"({self.config.buffers} buffers of {self.config.chunk_elements} {destination.dtype} elements)"
            )
            obstacle = accelerator.capabilities.why_not("events", "pins_host_memory")
            if obstacle is not None:
                self._refuse(f"{what}: {obstacle} Choose `strategy: pageable` to say so.", None)
                return None
            try:
                ring = StagingRing(
                    accelerator,
                    destination.dtype,
                    self.config.chunk_elements,
                    self.config.buffers,
                    destination.device.index,
                )
            except _REFUSALS as error:
                self._refuse(
                    f"{what}, and pinning them failed: {error}. Raise the limit on locked memory (`ulimit -l`, or the "
                    "container's memlock setting), or lower `pinned_staged.chunk_elements`.",
                    error,
                )
                return None
            self._rings[key] = ring
            self._warn_of_rounding(destination.dtype)
            return ring
        if not self.fallback:
            raise StrategyUnavailableError(self._refusal)
        return None

    def _refuse(self, reason: str, cause: BaseException | None) -> None:
        self._refusal = reason
        if not self.fallback:
            raise StrategyUnavailableError(reason) from cause
        warnings.warn(
            f"{reason} Until then `pageable` stands in, several times slower; `fallback: false` makes this an error.",
            FallbackWarning,
            stacklevel=2,
        )

    def _warn_of_rounding(self, dtype: torch.dtype) -> None:
        wanted = self.config.chunk_elements * dtype.itemsize
        taken = 1 << (wanted - 1).bit_length()
        if self.accelerator.capabilities.pin_rounds_to_power_of_two and taken - wanted > 2**20:
            warnings.warn(
                f"each staging buffer of {wanted} bytes really takes {taken}, because pinned memory is rounded up to "
                f"a power of two here: set `pinned_staged.chunk_elements` to {taken // dtype.itemsize} or "
                f"{taken // dtype.itemsize // 2}",
                PinnedMemoryWarning,
                stacklevel=2,
            )


def _close_rings(rings: _Rings) -> None:
    while rings:
        key = next(iter(rings))
        rings[key].close()
        del rings[key]
