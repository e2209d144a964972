"""A complete accelerator, as a vendor would write one: copy this file and replace its body with calls to your driver.

The device here is imaginary: its memory is host memory, each stream is a thread, an event is the
last piece of work submitted to a stream. Everything is really asynchronous, so a missing wait shows.

Tell users to install your package and write ``accelerator: acme``, or register it by hand::

    accelerators.register_accelerator("acme", AcmeAccelerator)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accelerators import Capabilities

_NOTHING: Future[None] = Future()
_NOTHING.set_result(None)


class AcmeStream:
    """Work runs in order, on a thread of its own; also after the stream was dropped."""

    def __init__(self, unfinished: dict[Future[Any], None]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="acme-stream")
        self._unfinished = unfinished
        self.last = _NOTHING

    def enqueue(self, work: Any, *arguments: Any) -> None:
        self.last = self._thread.submit(work, *arguments)
        self._unfinished[self.last] = None
        self.last.add_done_callback(self._unfinished.pop)

    def synchronize(self) -> None:
        self.last.result()

    def wait_event(self, event: AcmeEvent) -> None:
        self.enqueue(event.work.result)


class AcmeEvent:
    """The work that was last in the current stream when ``record`` was called."""

    def __init__(self, accelerator: AcmeAccelerator) -> None:
        self._accelerator = accelerator
        self.work = _NOTHING

    def record(self) -> None:
        self.work = self._accelerator.current_stream().last

    def synchronize(self) -> None:
        self.work.result()

    def query(self) -> bool:
        return self.work.done()


class AcmeAccelerator:
    """What ``accelerators.Accelerator`` asks for; its docstrings say what each method promises."""

    name = "acme"
    capabilities = Capabilities(
        streams=True,
        events=True,
        pins_host_memory=True,
        registers_host_memory=False,
        copies_asynchronously=True,
        reasons={"registers_host_memory": "The Acme driver cannot pin existing memory in place."},
    )

    def __init__(self) -> None:
        self.Stream = self._make_stream
        self._unfinished: dict[Future[Any], None] = {}  # the work of all streams
        self._current = threading.local()
        self._default = self._make_stream()
        # Address of each allocation to the storage there, for as long as that lives.
        self._device: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def unavailable_reason(self) -> str | None:
        return None  # or one sentence: "No Acme card was found."

    def Event(self) -> AcmeEvent:
        return AcmeEvent(self)

    def current_stream(self, device_index: int | None = None) -> AcmeStream:
        return getattr(self._current, "stream", self._default)

    @contextmanager
    def stream(self, stream: AcmeStream | None) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream or before
        try:
            yield
        finally:
            self._current.stream = before

    def synchronize(self, device_index: int | None = None) -> None:
        wait(list(self._unfinished))

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        return _remember(self._pinned, torch.empty(size, dtype=dtype, device=device))

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._pinned

    def unpin_memory(self, tensor: Tensor) -> bool:
        return self._pinned.pop(tensor.data_ptr(), None) is not None

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        return False

    def unregister_host_memory(self, address: int) -> None:
        return None

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not self.on_device(tensor)

    def on_device(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._device

    def device_empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        return _remember(self._device, torch.empty(size, dtype=dtype))

    def enqueue_copy(self, destination: Tensor, source: Tensor) -> None:
        stream = self.current_stream()
        stream.enqueue(_copy, destination, source)
        direct = self.on_device(source) or (self.is_pinned(source) and source.dtype == destination.dtype)
        if not direct or not (self.on_device(destination) or self.is_pinned(destination)):
            stream.synchronize()

    def _make_stream(self) -> AcmeStream:
        return AcmeStream(self._unfinished)


def _remember(where: weakref.WeakValueDictionary[int, torch.UntypedStorage], tensor: Tensor) -> Tensor:
    if tensor.numel():
        where[tensor.data_ptr()] = tensor.untyped_storage()
    return tensor


@torch.no_grad()
def _copy(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source)
