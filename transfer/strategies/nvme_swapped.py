"""``nvme_swapped``: values in a file reach the device while the file is still being read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelerators.errors import REFUSALS

from ..errors import ConfigError, StrategyUnavailableError
from ..in_flight import FINISHED, EventCopy, InFlightCopy, finish_stream
from ..memory.chunks import pairs_from, plan_chunks
from ..memory.holdings import Threads
from ..memory.ordinary_memory import OrdinaryMemory
from ..memory.scratch_ring import ScratchRing
from ..memory.staging_ring import StagingBuffer, StagingRing
from ..nvme.aligned_memory import ALIGNMENT_BYTES, buffer_of
from ..nvme.checksums import CHECKSUM_BYTES
from ..nvme.read_ahead import reading
from ..nvme.swapped_tensor import SwappedTensor
from ..nvme.writing import swap_out
from .buffered import BufferedTransfer
from .nvme_swapped_config import SLOTS, NvmeSwappedConfig


class NvmeSwappedTransfer(BufferedTransfer):
    """Reads a file chunk by chunk into pinned memory, while earlier chunks are cast and copied.

    With ``cast: device``, the bytes of the file are copied as they are into device scratch and cast there: the host
    only reads, and checks the checksums. With ``cast: host``, and on accelerators without streams, the host casts
    into pinned staging buffers. Without pinned memory (``pinned: false``, accelerators that pin none, destinations on
    the host), torch copies the values.

    ``submit`` blocks while the file is read. When it returns, the last ``buffers`` chunks are in flight, and the file
    may be changed or deleted. Every chunk is checked before any of it is used: where a file is damaged, the
    destination holds old values from there on. Pins ``Config.pinned_bytes`` for each device; where that or the scratch
    is refused, ``submit`` raises ``StrategyUnavailableError``. Threads take turns.
    """

    name = "nvme_swapped"
    reads_swapped = True
    Config = NvmeSwappedConfig
    config: NvmeSwappedConfig

    def swap_out(self, tensor: Tensor, name: str | None = None) -> SwappedTensor:
        """As ``transfer.nvme.swap_out``, to ``nvme_swapped.path`` and with ``nvme_swapped.checksums``.

        Raises:
            ConfigError: No path is configured.
            SwapError: As ``transfer.nvme.swap_out``.
        """
        if self.config.path is None:
            raise ConfigError("set `nvme_swapped.path` to the directory that values should be swapped out to")
        return swap_out(
            tensor,
            self.config.path,
            name,
            checksums=bool(self.config.checksums),
            threads=self.config.threads,
            checksum_bytes=min(CHECKSUM_BYTES, self.config.chunk_bytes),
        )

    def why_not(self, destination: Tensor, source: Any) -> str | None:
        if not isinstance(source, SwappedTensor):
            return "It copies values in files, and this source is a tensor."
        return super().why_not(destination, source)

    def _submit(self, destination: Tensor, source: SwappedTensor) -> InFlightCopy:
        capabilities = self._accelerator.capabilities
        pins = self.config.pinned and capabilities.why_not("events", "pins_host_memory") is None
        if not pins or not self._accelerator.on_device(destination):
            way = self._plainly
        elif self.config.cast == "device" and capabilities.why_not("streams", "copies_asynchronously") is None:
            way = self._cast_on_device
        else:
            way = self._cast_on_host
        return self._take_turn(way, destination, source)

    def _cast_on_device(self, destination: Tensor, source: SwappedTensor) -> InFlightCopy:
        ring = self._ring(destination, torch.uint8)
        scratch = self._scratch(destination, source.dtype)

        def deliver(first: int, values: Tensor, buffer: StagingBuffer) -> None:
            buffer.guard(*[scratch.send(*pair) for pair in pairs_from(destination, first, values)])

        with ring.session():
            scratch.begin()
            self._read(source, ring.acquire, deliver, direct=ring.is_aligned(ALIGNMENT_BYTES))
            return scratch.finish(destination)

    def _cast_on_host(self, destination: Tensor, source: SwappedTensor) -> InFlightCopy:
        ring = self._ring(destination, destination.dtype)
        event: Any = None

        def deliver(first: int, values: Tensor, _buffer: StagingBuffer) -> None:
            nonlocal event
            for offset, length in plan_chunks(values.numel(), ring.chunk_elements):
                for pair in pairs_from(destination, first + offset, values.narrow(0, offset, length)):
                    event = ring.send(*pair)

        with ring.session():
            self._read(source, self._ordinary_memory().acquire, deliver)
        return EventCopy(event, destination, counters=self._counters, accelerator=self._accelerator)

    def _plainly(self, destination: Tensor, source: SwappedTensor) -> InFlightCopy:
        accelerator, index = self._accelerator, destination.device.index
        stream = accelerator.current_stream(index)

        def deliver(first: int, values: Tensor, _buffer: StagingBuffer) -> None:
            started = time.perf_counter()
            for pair in pairs_from(destination, first, values):
                accelerator.enqueue_copy(*pair)
            finish_stream(accelerator, stream, index)  # before the next chunk is read into the same memory
            self._counters.add(pieces=1, wait_seconds=time.perf_counter() - started)

        with accelerator.stream(stream):
            self._read(source, self._ordinary_memory().acquire, deliver)
        return FINISHED

    def _read(
        self,
        source: SwappedTensor,
        acquire: Callable[[], StagingBuffer],
        deliver: Callable[[int, Tensor, StagingBuffer], None],
        *,
        direct: bool = True,
    ) -> None:
        """The pipeline: chunk ``k`` is delivered while the ones behind it are read.

        Args:
            source: The file.
            acquire: Gives memory for the next chunk, once no copy reads it any more.
            deliver: Copies one chunk: takes the index of its first element, its values, and the memory they are in.
            direct: Whether the memory is aligned, so that reads may go past the page cache.
        """
        config = self.config
        pending: deque[tuple[Any, StagingBuffer, Callable[[], None]]] = deque()

        def deliver_next() -> None:
            chunk, buffer, wait = pending.popleft()
            started = time.perf_counter()
            wait()
            self._counters.add(read_seconds=time.perf_counter() - started)
            deliver(
                chunk.first, buffer.memory.view(torch.uint8)[chunk.skip :][: chunk.num_bytes].view(source.dtype), buffer
            )

        with reading(
            source,
            self._held.get("threads", lambda: Threads(config.threads)).pool,
            capacity=config.chunk_bytes,
            threads=config.threads,
            request_bytes=config.request_bytes,
            checked=bool(config.checksums),
            direct=direct,
        ) as (ahead, chunks):
            for chunk in chunks:
                if len(pending) == max(1, config.buffers - 1):
                    deliver_next()
                buffer = acquire()
                pending.append((chunk, buffer, ahead.start(chunk, buffer_of(buffer.memory))))
            while pending:
                deliver_next()

    def _ring(self, destination: Tensor, dtype: torch.dtype) -> StagingRing:
        """Pinned memory for one device: of bytes, to read into, or of the destination's dtype, to cast into."""
        accelerator, config, index = self._accelerator, self.config, destination.device.index

        def make() -> StagingRing:
            elements = config.chunk_bytes // dtype.itemsize
            return StagingRing(accelerator, dtype, elements, config.buffers, index, self._counters)

        try:
            return self._held.get(("ring", destination.device, dtype), make)
        except StrategyUnavailableError:
            raise
        except REFUSALS as error:
            raise StrategyUnavailableError(
                f"nvme_swapped needs {config.pinned_bytes} bytes of pinned memory on {accelerator.name} "
                f"({config.buffers} buffers of {config.chunk_bytes} bytes). Pinning them failed: {error}. Allow "
                "this process more locked memory (`ulimit -l`, or the container's memlock setting), lower "
                "`nvme_swapped.chunk_elements`, or set `nvme_swapped.pinned: false`."
            ) from error

    def _scratch(self, destination: Tensor, dtype: torch.dtype) -> ScratchRing:
        accelerator, elements, index = (
            self._accelerator,
            self.config.chunk_bytes // dtype.itemsize,
            destination.device.index,
        )

        def make() -> ScratchRing:
            return ScratchRing(accelerator, dtype, elements, SLOTS, index, self._counters)

        scratch = self._held.get(("scratch", destination.device, dtype), make)
        error = scratch.allocate()
        if error is not None:
            raise StrategyUnavailableError(
                f"{self.config.scratch_bytes} bytes of device scratch are refused: {error}. Lower "
                "`nvme_swapped.chunk_elements`, or set `nvme_swapped.cast: host`."
            ) from error
        return scratch

    def _ordinary_memory(self) -> OrdinaryMemory:
        config = self.config
        return self._held.get("memory", lambda: OrdinaryMemory(config.chunk_bytes, config.buffers))
