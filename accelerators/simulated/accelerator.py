"""An accelerator without hardware: host memory posing as a device, with late copies.

Any program can be tested against it on a machine without a GPU. What a real device does sometimes,
it does always: a copy that was not waited for has not happened (see ``late_queue``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..errors import InFlightError
from ..overlap import address, bytes_of, span_bytes
from ..protocol import Capabilities
from .late_queue import LateQueue, SimulatedEvent, SimulatedStream
from .memory_ranges import MemoryRanges, Storages
from .schedule import Schedule
from .scheduled_queue import ScheduledQueue

if TYPE_CHECKING:
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

#: Fresh device and pinned memory is filled with this byte, a NaN in every floating dtype that has one.
POISON = 0xFF
_PAGE_BYTES = 4096


class SimulatedAccelerator:
    """Host memory posing as a device; one device, any number of streams, thread-safe.

    * Device memory comes from ``device_empty``, or ``adopt(tensor)`` declares that a tensor made
      elsewhere is on the device. Every other host tensor is on the host.
    * Non-blocking copies run only when an event, a stream or ``synchronize`` reaches them, in an
      order that the streams allow and ``seed`` picks. Copies between device tensors are queued too.
    * As on CUDA, a copy from host memory that is not pinned, or that casts, blocks.
    * Two copies on different streams that touch the same memory, at least one of them writing, without
      an event that orders them: the one that reads, or both that write, deliver NaNs (-1 in integers).
    * ``pinned_bytes`` counts what is pinned or registered and was not given back. Pinned memory is
      kept until ``unpin_memory``, so a leak stays visible.
    * Within ``capturing()`` the device records a graph, as CUDA does: work and waits raise, and an event recorded there
      never answers.
    * Faults: replace a public method on the instance (``accelerators.testing.failing`` does).

    Args:
        seed: Fixes the order of copies where streams leave a choice.
        streams: False for an accelerator without streams (``Stream`` is None).
        events: False for an accelerator without events (``Event`` is None).
        maps_host_memory: Whether ``device_view`` may be used.
        eager: Copies run when they are queued, and not as late as possible. Then a copy that was submitted before
            its source had its final values is wrong on every run.
        pin_limit_bytes: ``pin_empty`` and ``register_host_memory`` raise ``RuntimeError`` where
            more than this many bytes would be pinned, like a memlock limit. None: no limit.
        schedule: Decides when each copy runs, in place of ``seed`` and ``eager``: see ``explore``.
    """

    name = "simulated"

    def __init__(
        self,
        seed: int = 0,
        *,
        streams: bool = True,
        events: bool = True,
        maps_host_memory: bool = True,
        eager: bool = False,
        pin_limit_bytes: int | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.seed = seed
        self.maps_host_memory = maps_host_memory
        self.eager = eager
        self.pin_limit_bytes = pin_limit_bytes
        self._queue = LateQueue(seed) if schedule is None else ScheduledQueue(schedule, self._kind_of_memory)
        self._pinned = MemoryRanges()
        self._registered = MemoryRanges()
        self._device = Storages()
        self._pinned_tensors: dict[int, Tensor] = {}
        # Public attributes, not properties, so that a test can replace them on the instance.
        self.Stream: Callable[[], Any] | None = functools.partial(SimulatedStream, self._queue) if streams else None
        self.Event: Callable[[], Any] | None = functools.partial(SimulatedEvent, self._queue) if events else None

    def __repr__(self) -> str:
        return f"SimulatedAccelerator(seed={self.seed})"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            streams=self.Stream is not None,
            events=self.Event is not None,
            pins_host_memory=True,
            registers_host_memory=True,
            copies_asynchronously=True,
            maps_host_memory=self.maps_host_memory,
            reasons={
                "streams": "This simulated accelerator was made without streams.",
                "events": "This simulated accelerator was made without events.",
            },
        )

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are pinned or registered now."""
        return self._pinned.total_bytes + self._registered.total_bytes

    def unavailable_reason(self) -> str | None:
        return None

    def current_stream(self, device_index: int | None = None) -> SimulatedStream | None:
        return self._queue.current_stream if self.Stream is not None else None

    def stream(self, stream: SimulatedStream | None) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if stream is None else self._queue.use(stream)

    def is_current_stream_capturing(self, device_index: int | None = None) -> bool:
        return self._queue.capturing

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """The block in which every stream poses as one that records a graph."""
        self._queue.capturing = True
        try:
            yield
        finally:
            self._queue.capturing = False

    def synchronize(self, device_index: int | None = None) -> None:
        self._queue.reach_all()

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        tensor = _poisoned(shape, dtype, _PAGE_BYTES)
        if tensor.numel():
            with self._queue.lock:
                self._check_limit(tensor.nbytes)
                self._pinned.add(tensor.data_ptr(), tensor.nbytes)
                self._pinned_tensors[tensor.data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._is_readable(tensor)

    def _is_readable(self, tensor: Tensor) -> bool:
        """What a copy finds out for itself, whatever ``is_pinned`` was replaced by."""
        return self._pinned.contain(tensor) or self._registered.contain(tensor)

    def unpin_memory(self, tensor: Tensor) -> bool:
        """Gives pinned memory back; False for a view, or for what is not pinned.

        Raises:
            InFlightError: A queued copy still uses the memory, which stays pinned.
        """
        with self._queue.lock:
            if self._pinned.size_at(tensor.data_ptr()) != tensor.nbytes or tensor.numel() == 0:
                return False
            self._check_idle(tensor.data_ptr(), tensor.nbytes)
            self._pinned_tensors.pop(tensor.data_ptr(), None)  # gone, if this was interrupted before
            return self._pinned.remove(tensor.data_ptr())

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Pins existing memory in place.

        Raises:
            ValueError: There are no bytes to register.
            RuntimeError: Part of it is pinned or registered already, or the limit would be passed.
        """
        if num_bytes <= 0:
            raise ValueError(f"cannot register {num_bytes} bytes of host memory")
        with self._queue.lock:
            if self._pinned.overlaps(address, num_bytes) or self._registered.overlaps(address, num_bytes):
                raise RuntimeError(f"part of the {num_bytes} bytes at {address:#x} is pinned already")
            self._check_limit(num_bytes)
            self._registered.add(address, num_bytes)
        return True

    def unregister_host_memory(self, address: int) -> None:
        """Undoes ``register_host_memory``.

        Raises:
            RuntimeError: No registration begins at this address.
            InFlightError: A queued copy still uses the memory, which stays registered.
        """
        with self._queue.lock:
            size = self._registered.size_at(address)
            if size is None:
                raise RuntimeError(f"no registered host memory begins at {address:#x}")
            self._check_idle(address, size)
            self._registered.remove(address)

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not self._device.contain(tensor)

    def on_device(self, tensor: Tensor) -> bool:
        return self._device.contain(tensor)

    def device_empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        return self.adopt(_poisoned(size, dtype))

    def adopt(self, tensor: Tensor) -> Tensor:
        """Declares the whole storage under ``tensor`` to be device memory, while it lives.

        For tensors that other code allocated, such as DeepSpeed's low-precision partitions.
        Returns ``tensor`` itself.
        """
        self._device.add(tensor)
        return tensor

    def device_view(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor on the device.

        Raises:
            RuntimeError: It is not pinned, so that the device cannot read it.
        """
        if not self.is_pinned(tensor):
            raise RuntimeError(f"the device cannot address {tensor.nbytes} bytes of host memory that are not pinned")
        raw = torch.from_numpy(bytes_of(tensor).numpy())  # another storage
        return self.adopt(raw).view(tensor.dtype).view(tensor.shape)

    def enqueue_copy(self, destination: Tensor, source: Tensor) -> None:
        late = destination.dtype == source.dtype or self.on_device(source)
        readable = self.on_device(source) or self._is_readable(source)
        writable = self.on_device(destination) or self._is_readable(destination)
        if not (self.on_device(source) or self.on_device(destination)):
            with torch.no_grad():
                destination.copy_(source)
            return
        stream = self._queue.current_stream
        address(destination), address(source)  # before `detach`, which a wrapper may define
        self._queue.enqueue(stream, destination.detach(), source.detach())
        if self.eager or not (late and readable and writable):
            stream.synchronize()
        else:
            self._queue.moment()

    def as_deepspeed(self) -> DeepSpeedAccelerator:
        """A DeepSpeed accelerator over this one, for ``deepspeed.accelerator.set_accelerator``.

        DeepSpeed computes on the CPU then; ``accelerators.get_accelerator()`` returns this object.
        """
        from .deepspeed import SimulatedDeepSpeedAccelerator

        return cast("DeepSpeedAccelerator", SimulatedDeepSpeedAccelerator(self))

    def _kind_of_memory(self, tensor: Tensor) -> str:
        return "device" if self.on_device(tensor) else "pinned" if self._is_readable(tensor) else "pageable"

    def _check_limit(self, num_bytes: int) -> None:
        if self.pin_limit_bytes is not None and self.pinned_bytes + num_bytes > self.pin_limit_bytes:
            raise RuntimeError(
                f"cannot pin {num_bytes} bytes: {self.pinned_bytes} of {self.pin_limit_bytes} allowed are pinned"
            )

    def _check_idle(self, address: int, num_bytes: int) -> None:
        for tensor in self._queue.pending_tensors():
            begin = tensor.data_ptr()
            if begin < address + num_bytes and address < begin + span_bytes(tensor):
                raise InFlightError(f"the {num_bytes} bytes at {address:#x} are still used by a copy in flight")


def _poisoned(shape: Any, dtype: torch.dtype, alignment_bytes: int = 1) -> Tensor:
    """Memory that reads as NaN. What real accelerators pin begins at a page."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    with torch.inference_mode(False):
        memory = torch.full((num_bytes + alignment_bytes - 1,), POISON, dtype=torch.uint8, device="cpu")
        memory = memory.narrow(0, -memory.data_ptr() % alignment_bytes if num_bytes else 0, num_bytes)
        return memory.view(dtype).view(shape)
