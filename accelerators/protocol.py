"""What a strategy may call of an accelerator.

The names are DeepSpeed's own wherever DeepSpeed has one. Nothing here imports torch or deepspeed, so the module
loads in no time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .errors import InvalidAcceleratorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


#: What is said of an accelerator without a capability, where it gives no reason of its own.
_CANNOT = {
    "streams": "has no streams",
    "events": "has no events",
    "pins_host_memory": "does not pin host memory",
    "registers_host_memory": "does not page-lock memory in place",
    "copies_asynchronously": "does not copy asynchronously",
    "maps_host_memory": "does not map host memory",
    "pin_rounds_to_power_of_two": "pins what is asked for",
    "register_alignment_bytes": "registers no memory",
}


@dataclass(frozen=True)
class Capabilities:
    """What an accelerator can do, and why it cannot do the rest.

    Attributes:
        streams: Work can be queued on more than one stream.
        events: A point in a stream can be marked and waited for.
        pins_host_memory: ``pin_empty`` returns memory the device reads directly.
        registers_host_memory: ``register_host_memory`` pins existing memory in place.
        copies_asynchronously: A copy from pinned memory returns before the bytes have arrived.
        pin_rounds_to_power_of_two: ``pin_empty`` really takes the next power of two of the bytes
            asked for, as torch's caching host allocator does (pytorch issue 150517).
        register_alignment_bytes: ``register_host_memory`` wants addresses that are multiples of this;
            callers round down.
        maps_host_memory: The accelerator is a ``MapsHostMemory`` too.
        reasons: For a capability that is False, its name and why, as one sentence.
    """

    streams: bool
    events: bool
    pins_host_memory: bool
    registers_host_memory: bool
    copies_asynchronously: bool
    pin_rounds_to_power_of_two: bool = False
    register_alignment_bytes: int = 1
    maps_host_memory: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, *names: str) -> str | None:
        """The sentence for the first of ``names`` that is missing, or None if all are there."""
        for name in names:
            if not getattr(self, name):
                return self.reasons.get(name, f"This accelerator {_CANNOT[name]}.")
        return None


class Event(Protocol):
    """A mark in a stream. Strategies record each event once and never reuse it."""

    def record(self) -> None:
        """Marks the work queued so far on the current stream."""

    def synchronize(self) -> None:
        """Blocks the host until the marked work is done."""

    def query(self) -> bool:
        """Whether the marked work is done; does not block."""


class Stream(Protocol):
    """A queue of device work that runs in order."""

    def synchronize(self) -> None:
        """Blocks the host until everything queued here is done."""

    def wait_event(self, event: Any) -> None:
        """Makes work queued here from now on run after ``event``; does not block the host."""


class Accelerator(Protocol):
    """A device, the host memory it can read directly, and the copies between them.

    Every method may raise the vendor's own errors.

    Attributes:
        name: The name it is registered under, such as ``"cuda"``.
        capabilities: What it can do; constant for the life of the object.
        Event: Makes an ``Event`` when called without arguments; None without events.
        Stream: Makes a ``Stream`` when called without arguments; None without streams.
    """

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; constant for the life of the object."""

    @property
    def Event(self) -> Callable[[], Any] | None:
        """Makes an ``Event``, or is None."""

    @property
    def Stream(self) -> Callable[[], Any] | None:
        """Makes a ``Stream``, or is None."""

    def unavailable_reason(self) -> str | None:
        """Why this accelerator cannot be used here, as one sentence for skips and errors, or None. Never raises."""

    def current_stream(self, device_index: int | None = None) -> Any:
        """The calling thread's current stream on that device, or None without streams.

        Args:
            device_index: None: the thread's current device, here and in every method below.
        """

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which ``stream`` and its device are current; None changes nothing."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Blocks the host until all work on the device, on every stream, is done."""

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """Uninitialised host memory that the device reads directly.

        Args:
            *size: Elements in each dimension.
            dtype: Of the elements.
            device: Always ``"cpu"``; DeepSpeed's method has this argument.

        Raises:
            RuntimeError: Or the vendor's own error: the memory cannot be pinned. Nothing is allocated then.
        """

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the device can read all of this host tensor directly, without staging."""

    def unpin_memory(self, tensor: Tensor) -> bool | None:
        """Gives back the memory of a tensor that ``pin_empty`` returned. The caller has waited for its copies.

        Returns:
            True: it is given back. False: it was not pinned, or is a view. None: dropping the tensor gives it back.
        """

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Pins ``num_bytes`` of existing host memory in place; False where the accelerator cannot.

        Raises:
            RuntimeError: Or a subclass: the memory cannot be pinned, for instance because part of it is pinned
                already. Nothing has changed then.
        """

    def unregister_host_memory(self, address: int) -> None:
        """Undoes ``register_host_memory`` at a registered address. The caller has waited for its copies."""

    def on_host(self, tensor: Tensor) -> bool:
        """Whether the tensor lives in host memory."""

    def on_device(self, tensor: Tensor) -> bool:
        """Whether the tensor lives in this accelerator's memory."""

    def device_empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the current device."""

    def enqueue_copy(self, destination: Tensor, source: Tensor) -> None:
        """Queues ``destination.copy_(source)`` on the current stream of the destination's device.

        Does not block within the device, nor between the device and pinned host memory of the same dtype; both tensors
        must then outlive the copy. Otherwise blocks until the destination holds the values. A cast from host
        memory happens on the host, never in a device temporary of the source's size.
        """


class MapsHostMemory(Protocol):
    """What an accelerator with ``Capabilities.maps_host_memory`` has beside ``Accelerator``."""

    def device_view(self, tensor: Tensor) -> Tensor:
        """The same contiguous, pinned host memory as a tensor that the device addresses.

        A copy from it on a stream reads over the link. The caller keeps ``tensor`` alive for as long,
        and uses the view only if it lies at the address of ``tensor`` and on the destination's device.

        Raises:
            RuntimeError: Or the vendor's own error: the device cannot address the memory.
        """


class CapturesGraphs(Protocol):
    """What an accelerator whose streams can record a graph has beside ``Accelerator``. Looked for by its name."""

    def is_current_stream_capturing(self, device_index: int | None = None) -> bool:
        """Whether the calling thread's current stream on that device records a graph; takes well under a microsecond.

        Nothing may be waited for then, so that a copy would spoil the graph, and itself.
        """


class CachesHostMemory(Protocol):
    """What an accelerator that keeps pinned memory for later has beside ``Accelerator``. Looked for by its name."""

    def empty_host_cache(self) -> None:
        """Gives the memory back that is kept and not in use. May block until copies from it have ended."""


def check_accelerator(candidate: Any, origin: str) -> None:
    """Checks that an object has every member of ``Accelerator``, without calling any.

    Args:
        candidate: The object.
        origin: Where it comes from, as the beginning of a sentence.

    Raises:
        InvalidAcceleratorError: It lacks members, which are named; or it is a class.
    """
    if inspect.isclass(candidate):
        raise InvalidAcceleratorError(f"{origin} the class {candidate.__name__}, not an instance of it")
    absent = object()
    members = (*Accelerator.__annotations__, *(name for name in vars(Accelerator) if not name.startswith("_")))
    missing = [name for name in members if inspect.getattr_static(candidate, name, absent) is absent]
    if missing:
        raise InvalidAcceleratorError(
            f"{origin} {candidate!r}, which is not an accelerator: it has no {', '.join(missing)}"
        )
