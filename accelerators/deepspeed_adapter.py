"""The ``Accelerator`` protocol over any of DeepSpeed's accelerators, by feature test.

Works with DeepSpeed 0.16 to 0.19. ``unpin_memory`` and ``register_host_memory`` exist since
0.19.6, ``pin_empty`` since 0.19.7; older versions get a replacement or lack the capability.
Backends that behave differently have a file of their own and are listed in ``ADAPTERS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from .errors import AcceleratorUnavailableError
from .protocol import Accelerator, Capabilities, check_accelerator

#: DeepSpeed's name of a backend, and its adapter; every other backend takes the general one. A class that derives from
#: DeepSpeed's own for one of these takes that adapter too, whatever it calls itself.
ADAPTERS = {
    "cpu": "accelerators.cpu:CpuAccelerator",
    "cuda": "accelerators.cuda:CudaAccelerator",
    "hpu": "accelerators.hpu:HpuAccelerator",
    "mps": "accelerators.mps:MpsAccelerator",
}

_MODULES = "deepspeed.accelerator."
#: The attribute under which a DeepSpeed accelerator may carry a ready ``Accelerator``, which is used as it is.
CARRIED = "h2d_accelerator"


class DeepSpeedAdapter:
    """The general adapter: xpu, npu, mlu, sdaa, supa, and any DeepSpeed accelerator.

    Subclass it where a backend differs.

    Args:
        deepspeed_accelerator: A ``DeepSpeedAccelerator``.
    """

    def __init__(self, deepspeed_accelerator: Any) -> None:
        self._deepspeed = deepspeed_accelerator
        self.name: str = deepspeed_accelerator._name
        self._unusable: dict[str, str] = {}
        self.Event: Callable[[], Any] | None = self._maker("Event", "events")
        self.Stream: Callable[[], Any] | None = self._maker("Stream", "streams")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._deepspeed!r})"

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        streams, events = self.Stream is not None, self.Event is not None
        registers = self._overrides("register_host_memory")
        reasons = {
            "streams": f"DeepSpeed's {self.name} accelerator has no streams.",
            "events": f"DeepSpeed's {self.name} accelerator has no events.",
            "registers_host_memory": f"DeepSpeed's {self.name} accelerator cannot pin existing memory in place.",
            "copies_asynchronously": f"Copies to {self.name} are finished when they return.",
            **self._unusable,
        }
        return Capabilities(
            streams=streams,
            events=events,
            pins_host_memory=True,  # DeepSpeed has no way to ask; strategies look at what pin_empty returned
            registers_host_memory=registers,
            copies_asynchronously=streams,
            pin_rounds_to_power_of_two=not _pins_natively(),
            register_alignment_bytes=self._alignment(),
            reasons=reasons,
        )

    def unavailable_reason(self) -> str | None:
        try:
            available = self._deepspeed.is_available()
        except (ImportError, NameError, AttributeError, RuntimeError, AssertionError) as error:
            return _not_available(self.name, error)
        return None if available else f"The {self.name} accelerator is not available to torch {torch.__version__} here."

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._deepspeed.current_stream(device_index)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        if stream is None:
            return contextlib.nullcontext()
        return cast("AbstractContextManager[Any]", self._deepspeed.stream(stream))

    def is_current_stream_capturing(self, device_index: int | None = None) -> bool:
        """Whether the current stream records a graph; False where neither DeepSpeed nor torch can tell."""
        ask = self._asks_capturing
        return ask is not None and bool(ask())

    def synchronize(self, device_index: int | None = None) -> None:
        self._deepspeed.synchronize(device_index)

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
        if hasattr(self._deepspeed, "pin_empty"):
            return cast(Tensor, self._deepspeed.pin_empty(*size, dtype=dtype, device=device))
        # Before 0.19.7. The extra arguments of pin_memory changed their meaning in 0.19.6: pass none.
        return cast(Tensor, self._deepspeed.pin_memory(torch.empty(size, dtype=dtype, device=device)))

    def is_pinned(self, tensor: Tensor) -> bool:
        return bool(self._deepspeed.is_pinned(tensor))

    def unpin_memory(self, tensor: Tensor) -> bool | None:
        unpin = getattr(self._deepspeed, "unpin_memory", None)
        return None if unpin is None else unpin(tensor)

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        if not self.capabilities.registers_host_memory:
            return False
        if not self._deepspeed.register_host_memory(address, num_bytes):
            return False
        if not self._is_known_as_pinned(_memory_at(address, num_bytes)):
            # Such as on NPUs, whose torch may not know of what the driver has registered: every copy would block.
            self._deepspeed.unregister_host_memory(address)
            raise RuntimeError(f"{num_bytes} bytes were registered with {self.name}, which does not see them as pinned")
        return True

    def unregister_host_memory(self, address: int) -> None:
        if self.capabilities.registers_host_memory:
            self._deepspeed.unregister_host_memory(address)

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def on_device(self, tensor: Tensor) -> bool:
        return bool(self._deepspeed.on_accelerator(tensor))

    def device_empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._deepspeed.current_device_name())

    def enqueue_copy(self, destination: Tensor, source: Tensor) -> None:
        # A non-blocking copy that also casts would cast on the device, out of a temporary of the
        # source's size (DeepSpeed issue 7307). Between device tensors the flag changes nothing.
        host = destination if self.on_host(destination) else source
        destination.copy_(source, non_blocking=destination.dtype == source.dtype and self._is_known_as_pinned(host))

    def empty_host_cache(self) -> None:
        """Gives the pinned memory back that torch keeps for later; does nothing where torch cannot."""
        empty = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
        empty = empty or getattr(torch._C, "_host_emptyCache", None)  # before torch 2.9
        if empty is not None and self.Stream is not None:
            empty()

    def range_push(self, message: str) -> None:
        """Opens a named range in the vendor's profiler, where there is one."""
        self._deepspeed.range_push(message)

    def range_pop(self) -> None:
        """Closes the range that ``range_push`` opened last."""
        self._deepspeed.range_pop()

    @functools.cached_property
    def _asks_capturing(self) -> Callable[[], bool] | None:
        """DeepSpeed's own where the backend has one, else that of torch's runtime of the same name (``torch.npu``)."""
        name = "is_current_stream_capturing"
        if self._overrides(name):
            return cast("Callable[[], bool]", getattr(self._deepspeed, name))
        runtime = getattr(torch, self.name, None)
        has_device = getattr(runtime, "is_available", lambda: False)()  # a torch without the backend has a dummy
        return getattr(runtime, name, None) if has_device else None

    def _maker(self, name: str, capability: str) -> Callable[[], Any] | None:
        """DeepSpeed's class for events or streams; None where there is none, or where it cannot be called plainly."""
        make: Callable[[], Any] | None = getattr(self._deepspeed, name)
        try:
            if make is not None:
                inspect.signature(make).bind()
        except ValueError:  # a class in C tells nothing
            pass
        except TypeError as error:
            self._unusable[capability] = f"The {name} of DeepSpeed's {self.name} accelerator takes arguments ({error})."
            return None
        return make

    def _is_known_as_pinned(self, tensor: Tensor) -> bool:
        with contextlib.suppress(Exception):  # of a vendor that cannot say: a copy that blocks needs no answer
            return self.is_pinned(tensor)
        return False

    def _alignment(self) -> int:
        alignment = getattr(self._deepspeed, "pin_memory_alignment", None)  # since 0.19.8
        return 1 if alignment is None else int(alignment())

    def _overrides(self, method: str) -> bool:
        """Whether the backend has its own ``method``, not just the refusal in DeepSpeed's base class."""
        from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

        own = getattr(type(self._deepspeed), method, None)
        return own is not None and own is not getattr(DeepSpeedAccelerator, method, None)


def current_deepspeed_accelerator() -> Accelerator:
    """DeepSpeed's current accelerator, adapted; the same object for as long as DeepSpeed's stays."""
    try:
        from deepspeed.accelerator import get_accelerator

        current = get_accelerator()
    except (ImportError, ValueError, AssertionError) as error:  # such as a wrong $DS_ACCELERATOR
        raise AcceleratorUnavailableError(f"DeepSpeed cannot choose an accelerator here: {error}") from error
    return adapt(current)


def adapt(deepspeed_accelerator: Any) -> Accelerator:
    """The ``Accelerator`` for a DeepSpeed accelerator: the one it carries, or an adapter over it."""
    global _last
    if _last is not None and _last[0] is deepspeed_accelerator:
        return _last[1]
    carried = getattr(deepspeed_accelerator, CARRIED, None)
    if carried is not None:
        check_accelerator(carried, f"{deepspeed_accelerator!r}.{CARRIED} is")
        adapted = cast(Accelerator, carried)
    else:
        adapted = _adapter_class(deepspeed_accelerator)(deepspeed_accelerator)
    _last = (deepspeed_accelerator, adapted)
    return adapted


#: One pair is enough: a process has one DeepSpeed accelerator at a time.
_last: tuple[Any, Accelerator] | None = None


def make(name: str) -> Accelerator:
    """Makes the accelerator that DeepSpeed calls ``name``, whether or not it is DeepSpeed's choice.

    Raises:
        AcceleratorUnavailableError: DeepSpeed or the vendor's package cannot set it up here.
    """
    try:
        from deepspeed.accelerator import get_accelerator

        current = get_accelerator()
        if current._name == name and getattr(current, CARRIED, None) is None:
            return adapt(current)
        module = importlib.import_module(f"deepspeed.accelerator.{name}_accelerator")
        made = getattr(module, f"{name.upper()}_Accelerator")()
        return _adapter_class(made)(made)
    except (ImportError, NameError, AttributeError, RuntimeError, ValueError, AssertionError) as error:
        raise AcceleratorUnavailableError(_not_available(name, error)) from error


def _not_available(name: str, error: Exception) -> str:
    return f"The {name} accelerator is not available here: {str(error).strip().rstrip('.')}."


def _adapter_class(deepspeed_accelerator: Any) -> type[DeepSpeedAdapter]:
    """By the class first: klxpu, and vendors' own, are DeepSpeed's CUDA accelerator under other names."""
    bases = (base.__module__.removeprefix(_MODULES) for base in type(deepspeed_accelerator).__mro__)
    names = [base.removesuffix("_accelerator") for base in bases]
    # Not so the CPU's: a vendor may begin with it, and has a device of its own.
    name = next((each for each in names if each in ADAPTERS and each != "cpu"), deepspeed_accelerator._name)
    if name not in ADAPTERS:
        return DeepSpeedAdapter
    module, _, attribute = ADAPTERS[name].partition(":")
    return cast("type[DeepSpeedAdapter]", getattr(importlib.import_module(module), attribute))


def _memory_at(address: int, num_bytes: int) -> Tensor:
    """Host memory as a tensor, to be asked about and not read."""
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def _pins_natively() -> bool:
    """Whether ``DS_PIN_MEMORY_BACKEND=native`` is in force: DeepSpeed's own page-locked allocator."""
    try:
        from deepspeed.utils.pin_memory import get_active_native_pinned_memory
    except ImportError:  # before 0.19.6
        return False
    return get_active_native_pinned_memory() is not None
