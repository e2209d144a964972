"""Accelerators by name, the one that ``set_accelerator`` sets, and DeepSpeed's own choice."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from .errors import (
    AcceleratorError,
    AcceleratorRegistrationError,
    AcceleratorUnavailableError,
    UnknownAcceleratorError,
)
from .plugin_registry import Registry
from .protocol import Accelerator, check_accelerator

Factory = Callable[[], Accelerator]

#: Other names of accelerators, each with DeepSpeed's name.
_SYNONYMS = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "amd": "cuda",
    "rocm": "cuda",
    "hip": "cuda",
    "intel": "xpu",
    "ascend": "npu",
    "gaudi": "hpu",
    "metal": "mps",
    "host": "cpu",
}

_registry: Registry[Factory] = Registry(
    "accelerator", "transfer.accelerators", AcceleratorRegistrationError, UnknownAcceleratorError, _SYNONYMS
)
_made: dict[str, Accelerator] = {}
_chosen: Accelerator | None = None
_lock = threading.RLock()


def register_accelerator(name: str, factory: Factory) -> None:
    """Registers an accelerator under a name that ``get_accelerator`` and YAML files can use.

    Args:
        name: A lower-case identifier that is not registered yet.
        factory: Called without arguments, once, when the accelerator is first needed; returns an
            object with the ``Accelerator`` protocol.

    Raises:
        AcceleratorRegistrationError: The name is taken or unusable, or ``factory`` cannot be
            called. Nothing is registered then.
    """
    if not callable(factory):
        raise AcceleratorRegistrationError(
            f"accelerator {name!r}: the factory must be callable without arguments, "
            f"but it is {factory!r}; pass a function or a class"
        )
    _registry.add(name, factory)


def unregister_accelerator(name: str) -> None:
    """Undoes ``register_accelerator``; does nothing for an unknown name. Accelerators in use keep working."""
    with _lock:
        _registry.remove(name)
        _made.pop(name, None)


def available_accelerators() -> tuple[str, ...]:
    """The names that ``get_accelerator`` accepts, sorted.

    Calls no factory and touches no device. ``get_accelerator(name).unavailable_reason()`` says whether the
    hardware is there.
    """
    return _registry.names()


def explain_unknown(name: object) -> str:
    """The sentence for a name that is not registered, with the nearest one that is."""
    return _registry.explain_unknown(name)


def get_accelerator(name: str | None = None) -> Accelerator:
    """Returns an accelerator; the same object for the same name.

    Args:
        name: A registered name. None: what ``set_accelerator`` set, or else the accelerator that
            DeepSpeed chose (``deepspeed.accelerator.get_accelerator()``), adapted.

    Raises:
        UnknownAcceleratorError: ``name`` is not registered; the message gives the nearest one.
        AcceleratorRegistrationError: Two plug-ins claim ``name``, or one failed to load.
        InvalidAcceleratorError: The factory returned something without the protocol.
        AcceleratorUnavailableError: The factory itself raised, or DeepSpeed cannot choose one.
    """
    if name is None:
        if _chosen is not None:
            return _chosen
        from .deepspeed_adapter import current_deepspeed_accelerator

        return current_deepspeed_accelerator()
    with _lock:
        if name not in _made:
            _made[name] = _make(name, _registry.get(name))
        return _made[name]


def set_accelerator(accelerator: Accelerator | str | None) -> None:
    """Sets what ``get_accelerator()`` returns, for this process.

    Args:
        accelerator: An accelerator, a registered name, or None to follow DeepSpeed again.

    Raises:
        InvalidAcceleratorError: The object lacks members of the protocol, which are named.
        AcceleratorError: As ``get_accelerator``, for a name. The choice is unchanged.
    """
    global _chosen
    if isinstance(accelerator, str):
        accelerator = get_accelerator(accelerator)
    elif accelerator is not None:
        check_accelerator(accelerator, "set_accelerator was given")
    _chosen = accelerator


def _make(name: str, factory: Factory) -> Accelerator:
    try:
        accelerator = factory()
    except AcceleratorError:
        raise
    except Exception as error:
        raise AcceleratorUnavailableError(f"accelerator {name!r}: its factory {factory!r} failed: {error}") from error
    check_accelerator(accelerator, f"accelerator {name!r}: its factory {factory!r} returned")
    return accelerator


def _deepspeed(name: str) -> Accelerator:
    from .deepspeed_adapter import make

    return make(name)


def _simulated() -> Accelerator:
    from .simulated.accelerator import SimulatedAccelerator

    return SimulatedAccelerator()


# Those that are registered from the start. Adding one is adding a name here.
for _name in ("cpu", "cuda", "hpu", "klxpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu"):
    register_accelerator(_name, functools.partial(_deepspeed, _name))
register_accelerator("simulated", _simulated)
