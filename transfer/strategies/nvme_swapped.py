"""``nvme_swapped``: values in a file reach the device while the file is still being read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ..errors import ConfigError, FallbackWarning, warn_caller
from ..in_flight import InFlightCopy
from ..memory.scratch_ring import ScratchLanes
from ..memory.staging_ring import StagingBuffer
from ..nvme.aligned_memory import ALIGNMENT_BYTES, buffer_of, round_up
from ..nvme.checksums import CHECKSUM_BYTES
from ..nvme.read_ahead import Chunk, reading
from ..nvme.swapped_tensor import SwappedTensor
from ..nvme.writing import swap_out
from ..schema.fields import BufferCount, Directory, Elements, Flag, ThreadCount, one_of, parse_size, refuse
from ..schema.model import StrategyConfig
from ._nvme_holdings import NvmeHoldings
from ._nvme_routes import DeviceCastRoute, HostCastRoute, HostMemory, PlainRoute, Route
from .buffered import ExclusiveTransfer
from .pinned_staged import PinnedStagedTransfer

#: One casts on the device while the other fills.
_LANES = 2


def _reader(value: Any) -> str:
    if value == "aio":
        raise refuse(
            "DeepSpeed's op reports reads that failed as done, and was slower wherever both were measured; leave the "
            "key out: files are read by the system's preadv"
        )
    if value != "posix":
        raise refuse("expected posix, which is the default")
    return "posix"


def _request_bytes(value: Any) -> int:
    size = parse_size(value)
    if size < ALIGNMENT_BYTES or size % ALIGNMENT_BYTES:
        raise refuse(f"expected a multiple of {ALIGNMENT_BYTES} bytes")
    return size


#: Where values are cast.
Cast = Annotated[str, one_of("device", "host")]
#: What reads files: there is one way.
Reader = Annotated[str, BeforeValidator(_reader)]
#: A size in bytes that is a multiple of 4096.
RequestBytes = Annotated[int, BeforeValidator(_request_bytes)]


class NvmeSwappedConfig(StrategyConfig):
    """The section ``nvme_swapped``.

    Attributes:
        path: The directory that ``NvmeSwappedTransfer.swap_out`` writes to. Reading needs none.
        chunk_elements: fp32 elements that each buffer holds: a chunk, of which one is copied, one cast and the
            others read at the same time.
        buffers: How many.
        cast: Where the values are cast: ``device`` or ``host``.
        reader: ``posix``, the system's ``preadv``: the one there is.
        threads: How many read at once.
        request_bytes: The most that a thread asks the drive for at a time; a multiple of 4096.
        checksums: Whether files are written with checksums, and those that have some are compared with them.
    """

    renamed: ClassVar[Mapping[str, str]] = {"block_bytes": "request_bytes"}

    path: Directory = None
    chunk_elements: Elements = 2**22
    buffers: BufferCount = 8
    cast: Cast = "device"
    reader: Reader = "posix"
    threads: ThreadCount = 12
    request_bytes: RequestBytes = 2**22
    checksums: Flag = True

    @property
    def chunk_bytes(self) -> int:
        """Bytes of each buffer."""
        return round_up(self.chunk_elements * 4, ALIGNMENT_BYTES)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory for each device."""
        return self.chunk_bytes * self.buffers

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device memory for each device and source dtype, where the device casts."""
        return self.chunk_bytes * _LANES


class NvmeSwappedTransfer(ExclusiveTransfer):
    """Reads a file chunk by chunk into pinned memory, while earlier chunks are cast and copied.

    With ``cast: device``, the bytes of the file cross as they are into device scratch and are cast there: no work
    for the host but to read, and to check the checksums. With ``cast: host``, and where there are no streams or
    no scratch, the host casts into pinned staging buffers. Where there is nothing to pin, and to destinations on the
    host, values are cast right into the destination.

    ``submit`` blocks while the file is read; the last ``buffers`` chunks are in flight when it returns, and
    the file may change or go then. Every chunk is checked before any of it is used: where a file is damaged, the
    destination holds old values from there on. Pins ``Config.pinned_bytes`` for each device. A source that is a
    tensor goes to ``pinned_staged``. Threads take turns; a submit from inside another one of the same thread
    uses memory of its own, which is not pinned.

    Where pinning is refused, files are read into pageable memory after one ``FallbackWarning``. With
    ``fallback=False`` that is a ``StrategyUnavailableError``.
    """

    name = "nvme_swapped"
    reads_swapped = True
    Config = NvmeSwappedConfig
    config: NvmeSwappedConfig

    def __init__(
        self,
        config: NvmeSwappedConfig | Mapping[str, Any] | None = None,
        accelerator: Accelerator | str | None = None,
        *,
        fallback: bool = True,
        **options: Any,
    ) -> None:
        self._held: NvmeHoldings = NvmeHoldings()
        self._stand_in = PinnedStagedTransfer(accelerator=accelerator, fallback=fallback)
        self._no_scratch_on: Accelerator | None = None
        super().__init__(config, accelerator, fallback=fallback, **options)

    @property
    def pinned_bytes(self) -> int:
        return self._held.pinned_bytes + super().pinned_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._held.scratch_bytes

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

    def _crosses(self, accelerator: Accelerator, destination: Tensor, source: Any) -> bool:  # noqa: ARG002
        return isinstance(source, SwappedTensor)

    def _cross(self, accelerator: Accelerator, destination: Tensor, source: SwappedTensor) -> InFlightCopy:
        self._held.release()  # where an earlier close was interrupted
        route = self._route(accelerator, destination, source.dtype)
        return self._read(route, self._held.pool(self.config.threads), source)

    def _cross_inside(self, accelerator: Accelerator, destination: Tensor, source: Any) -> InFlightCopy:
        if not isinstance(source, SwappedTensor):
            return super()._cross_inside(accelerator, destination, source)
        memory = HostMemory(self.config.chunk_bytes, self.config.buffers)
        route = PlainRoute(accelerator, destination, source.dtype, self._counters, memory)
        with ThreadPoolExecutor(self.config.threads) as pool:
            return self._read(route, pool, source)

    def _read(self, route: Route, pool: ThreadPoolExecutor, source: SwappedTensor) -> InFlightCopy:
        """The pipeline: chunk ``k`` is delivered while the ones behind it are read."""
        with (
            route.session(),
            reading(
                source,
                pool,
                capacity=self.config.chunk_bytes,
                threads=self.config.threads,
                request_bytes=self.config.request_bytes,
                checked=bool(self.config.checksums),
                direct=route.is_aligned,
            ) as (ahead, chunks),
        ):
            pending: deque[tuple[Chunk, StagingBuffer, Callable[[], None]]] = deque()
            for chunk in chunks:
                if len(pending) == max(1, self.config.buffers - 1):
                    self._deliver(route, *pending.popleft())
                buffer = route.acquire()
                pending.append((chunk, buffer, ahead.start(chunk, buffer_of(buffer.memory))))
            while pending:
                self._deliver(route, *pending.popleft())
            return route.finish()

    def _deliver(self, route: Route, chunk: Chunk, buffer: StagingBuffer, wait: Callable[[], None]) -> None:
        started = time.perf_counter()
        wait()
        self._counters.add(read_seconds=time.perf_counter() - started)
        route.deliver(chunk, buffer)

    def _route(self, accelerator: Accelerator, destination: Tensor, dtype: torch.dtype) -> Route:
        """The fastest way that runs here."""
        common = (accelerator, destination, dtype, self._counters)
        capacity, buffers = self.config.chunk_bytes, self.config.buffers
        pins = accelerator.capabilities.why_not("events", "pins_host_memory") is None
        if self._refused_by is accelerator:
            self._require_fallback(self._refusal)
        elif pins and accelerator.on_device(destination):
            try:
                ring = self._held.ring(accelerator, destination.device, capacity, buffers)
            except REFUSALS as error:
                self._refuse(accelerator, self._pin_refusal(accelerator, error), error)
            else:
                lanes = self._lanes(accelerator, destination, dtype)
                if lanes is not None:
                    return DeviceCastRoute(*common, ring, lanes)
                return HostCastRoute(*common, self._host_memory(), ring)
        return PlainRoute(*common, self._host_memory())

    def _lanes(self, accelerator: Accelerator, destination: Tensor, dtype: torch.dtype) -> ScratchLanes | None:
        """Lanes with scratch, or None where the host casts."""
        missing = accelerator.capabilities.why_not("streams", "copies_asynchronously")
        if self.config.cast == "host" or missing is not None or self._no_scratch_on is accelerator:
            return None
        key = (id(accelerator), destination.device, dtype)
        lanes = self._held.lanes.get(key)
        if lanes is None:
            elements = self.config.chunk_bytes // dtype.itemsize
            lanes = ScratchLanes(accelerator, dtype, elements, _LANES, destination.device.index)
            error = lanes.allocate()
            if error is not None:
                self._no_scratch_on = accelerator
                refusal = f"{self.config.scratch_bytes} bytes of device scratch are refused: {error}."
                self._require_fallback(refusal, error)
                self._warn(f"{refusal} The host casts; `nvme_swapped.cast: host` avoids this message")
                return None
            self._held.lanes[key] = lanes
        return lanes

    def _host_memory(self) -> HostMemory:
        if self._held.host_memory is None:
            self._held.host_memory = HostMemory(self.config.chunk_bytes, self.config.buffers)
        return self._held.host_memory

    def _pin_refusal(self, accelerator: Accelerator, error: BaseException) -> str:
        return (
            f"nvme_swapped needs {self.config.pinned_bytes} bytes of pinned memory on {accelerator.name} "
            f"({self.config.buffers} buffers of {self.config.chunk_bytes} bytes). Pinning them failed: {error}. Allow "
            "this process more locked memory (`ulimit -l`, or the container's memlock setting) or lower "
            "`nvme_swapped.chunk_elements`."
        )

    def _warn_of_stand_in(self, refusal: str) -> None:
        self._warn(f"{refusal} Files are now read into pageable memory")

    def _warn(self, message: str) -> None:
        warn_caller(f"{message}, which is slower; `fallback: false` makes this an error.", FallbackWarning)
