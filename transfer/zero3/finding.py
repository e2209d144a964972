"""The ZeRO-3 optimizer and the engine in whatever a framework has wrapped them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

#: Where engines and wrappers keep what they wrap: DeepSpeed's and the HF Trainer's optimizer wrappers, Accelerate's
#: engine wrapper and ``Accelerator``, Lightning's strategy, ``torch.nn`` wrappers.
_WITHIN = ("optimizer", "engine", "deepspeed_engine", "deepspeed_engine_wrapped", "module")
#: Framework wrapper -> wrapper -> engine -> optimizer wrapper -> optimizer.
_DEPTH = 4


def is_engine(thing: Any) -> bool:
    """Whether this is a DeepSpeed engine: what has a monitor."""
    return hasattr(thing, "monitor") and hasattr(thing, "global_samples")


def find(engine: Any, is_it: Callable[[Any], bool]) -> Any:
    """The first of an object and what it wraps for which ``is_it`` holds; None where there is none."""
    return next(filter(is_it, _unwrapped(engine)), None)


def weakly(engine: Any) -> weakref.ref[Any] | None:
    """A weak reference, or None where there is nothing, or it takes none."""
    try:
        return None if engine is None else weakref.ref(engine)
    except TypeError:
        return None


def _unwrapped(engine: Any) -> Iterator[Any]:
    """The object and what it wraps, the outer ones first, each once."""
    level, seen = [engine], {id(engine)}
    for _ in range(_DEPTH + 1):
        yield from level
        # An engine's module is the user's model, which may hold engines of its own.
        names = [(each, ("optimizer",) if is_engine(each) else _WITHIN) for each in level]
        found = [_attribute(each, name) for each, within in names for name in within]
        level = []
        for each in found:
            if each is not None and id(each) not in seen:
                seen.add(id(each))
                level.append(each)


def _attribute(thing: Any, name: str) -> Any:
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001 - a property of a framework's, before there is anything to wrap
        return None
