"""``pinned_staged``: cast on the host into a ring of pinned buffers, copy from there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ..errors import PinnedMemoryWarning, warn_caller
from ..in_flight import EventCopy, InFlightCopy
from ..memory.chunks import paired_chunks
from ..memory.staging_ring import StagingRing
from ..schema.fields import BufferCount, Elements
from ..schema.model import StrategyConfig
from .buffered import ExclusiveTransfer
from .pageable import PageableTransfer


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


class PinnedStagedTransfer(ExclusiveTransfer):
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

    name = "pinned_staged"
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
        self._held = self._rings = _Rings()
        self._stand_in = PageableTransfer(accelerator=accelerator)
        super().__init__(config, accelerator, fallback=fallback, **options)

    @property
    def pinned_bytes(self) -> int:
        return sum(ring.pinned_bytes for ring in tuple(self._rings.values())) + super().pinned_bytes

    def _cross(self, accelerator: Accelerator, destination: Tensor, source: Tensor) -> InFlightCopy:
        ring = self._ring(accelerator, destination)
        if ring is None:
            return self._pass_on(self._stand_in, destination, source)
        event: Any = None
        pieces, cast_seconds, wait_seconds = 0, 0.0, 0.0
        # Entering the stream makes the destination's device current, so that events belong to it.
        stream = accelerator.current_stream(destination.device.index)
        with ring.session(), accelerator.stream(stream):
            for target, piece in paired_chunks(destination, source, self.config.chunk_elements):
                started = time.perf_counter()
                buffer = ring.acquire()
                acquired = time.perf_counter()
                staged = buffer.memory.narrow(0, 0, piece.numel()).view(piece.shape)
                staged.copy_(piece)
                cast = time.perf_counter()
                accelerator.enqueue_copy(target, staged)
                event = accelerator.Event()  # type: ignore[misc]  # not None: _ring has checked
                event.record()
                buffer.guard(event)
                pieces += 1
                wait_seconds += acquired - started
                cast_seconds += cast - acquired
        self._counters.add(pieces=pieces, wait_seconds=wait_seconds, cast_seconds=cast_seconds)
        return EventCopy(event, destination, counters=self._counters)

    def _ring(self, accelerator: Accelerator, destination: Tensor) -> StagingRing | None:
        """The ring for this destination, or None where ``pageable`` stands in."""
        key = (id(accelerator), destination.device, destination.dtype)
        ring = self._rings.get(key)
        if ring is not None and not ring.closing:
            return ring
        self._rings.release()  # where an earlier close was interrupted
        if self._refused_by is accelerator:
            self._require_fallback(self._refusal)
            return None
        obstacle = accelerator.capabilities.why_not("events", "pins_host_memory")
        if obstacle is not None:
            remedy = "Choose `strategy: pageable` to avoid this message."
            self._refuse(accelerator, f"{self._needs(accelerator, destination.dtype)} {obstacle} {remedy}")
            return None
        ring = StagingRing(accelerator, destination.dtype, self.config.chunk_elements, destination.device.index)
        self._rings[key] = ring
        try:
            ring.pin(self.config.buffers)
        except BaseException as error:
            ring.closing = True
            with contextlib.suppress(Exception):  # what stays pinned, the next close tries again
                self._rings.release()
            if not isinstance(error, REFUSALS):
                raise
            remedy = (
                "Allow this process more locked memory (`ulimit -l`, or the container's memlock setting) or lower "
                "`pinned_staged.chunk_elements`."
            )
            needs = self._needs(accelerator, destination.dtype)
            self._refuse(accelerator, f"{needs} Pinning them failed: {error}. {remedy}", error)
            return None
        self._warn_of_rounding(accelerator, destination.dtype)
        return ring

    def _needs(self, accelerator: Accelerator, dtype: torch.dtype) -> str:
        return (
            f"pinned_staged needs {self.config.pinned_bytes(dtype)} bytes of pinned memory on {accelerator.name} "
            f"({self.config.buffers} buffers of {self.config.chunk_elements} {dtype} elements)."
        )

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


class _Rings(dict[tuple[int, torch.device, torch.dtype], StagingRing]):
    """A ring for each accelerator (by identity; the ring keeps it alive), device and dtype."""

    def mark(self) -> None:
        for ring in list(self.values()):
            ring.closing = True

    def release(self) -> None:
        while marked := [(key, ring) for key, ring in list(self.items()) if ring.closing and ring.is_ours]:
            for key, ring in marked:
                ring.close()
                self.pop(key, None)
