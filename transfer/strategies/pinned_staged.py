"""``pinned_staged``: cast on the host into a ring of pinned buffers, copy from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ..errors import PinnedMemoryWarning, StrategyUnavailableError, warn_caller
from ..in_flight import EventCopy, InFlightCopy
from ..memory.chunks import paired_chunks
from ..memory.staging_ring import StagingRing
from ..schema.fields import BufferCount, Elements
from ..schema.model import StrategyConfig
from .buffered import BufferedTransfer


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


class PinnedStagedTransfer(BufferedTransfer):
    """Casts chunk after chunk into pinned staging buffers on the host while earlier ones are copied.

    The cast is the host's own, so the bits are those of a blocking copy. Each buffer is written
    again only after the event of the copy that read it.

    Pins ``Config.pinned_bytes(dtype)`` for each dtype and device of the destinations it has seen,
    at the first copy to them; where that is refused, ``submit`` raises ``StrategyUnavailableError``. Reads the source
    during ``submit``, which blocks while the host casts and while buffers are in use; the last ``buffers`` chunks are
    in flight when it returns. Threads take turns.
    """

    name = "pinned_staged"
    Config = PinnedStagedConfig
    config: PinnedStagedConfig

    def why_not(self, destination: Tensor, source: Any) -> str | None:
        problem = super().why_not(destination, source)
        return problem or self.accelerator.capabilities.why_not("events", "pins_host_memory")

    def _submit(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        return self._take_turn(self._send, destination, source)

    def _send(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        event: Any = None
        ring = self._ring(destination)
        with ring.session():
            for target, values in paired_chunks(destination, source, self.config.chunk_elements):
                event = ring.send(target, values)
        return EventCopy(event, destination, counters=self._counters, accelerator=self._accelerator)

    def _ring(self, destination: Tensor) -> StagingRing:
        """The ring for destinations of this device and dtype."""
        accelerator, config, dtype = self._accelerator, self.config, destination.dtype
        index = destination.device.index

        def make() -> StagingRing:
            _warn_of_rounding(accelerator, config.chunk_elements, dtype)
            return StagingRing(accelerator, dtype, config.chunk_elements, config.buffers, index, self._counters)

        try:
            return self._held.get((destination.device, dtype), make)
        except StrategyUnavailableError:
            raise
        except REFUSALS as error:
            raise StrategyUnavailableError(
                f"pinned_staged needs {config.pinned_bytes(dtype)} bytes of pinned memory on {accelerator.name} "
                f"({config.buffers} buffers of {config.chunk_elements} {dtype} elements). Pinning them failed: "
                f"{error}. Allow this process more locked memory (`ulimit -l`, or the container's memlock "
                "setting) or lower `pinned_staged.chunk_elements`."
            ) from error


def _warn_of_rounding(accelerator: Accelerator, chunk_elements: int, dtype: torch.dtype) -> None:
    wanted = chunk_elements * dtype.itemsize
    taken = 1 << (wanted - 1).bit_length()
    if accelerator.capabilities.pin_rounds_to_power_of_two and taken - wanted > 2**20:
        warn_caller(
            f"each staging buffer of {wanted} bytes really takes {taken}, because pinned memory is rounded up to "
            f"a power of two here: set `pinned_staged.chunk_elements` to {taken // dtype.itemsize} or "
            f"{taken // dtype.itemsize // 2}",
            PinnedMemoryWarning,
        )
