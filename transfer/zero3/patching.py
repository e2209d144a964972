"""Methods of DeepSpeed's classes, replaced and given back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

#: What replaces a method: called with the original first, then with the method's own arguments.
Replacement = Callable[..., Any]

#: The methods that were replaced and not all given back.
active: set[tuple[type, str]] = set()

#: Each function of ours that was put in place of a method, and what it replaced.
_originals: dict[Any, Callable[..., Any]] = {}


def zero3_classes() -> list[type]:
    """DeepSpeed's classes that define a copy-back."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    classes: list[type] = [DeepSpeedZeroOptimizer_Stage3]
    try:
        from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
    except ImportError:  # before 0.18
        return classes
    return [*classes, SuperOffloadOptimizer_Stage3]


def hook_optimizer_class(optimizer_class: type, replacements: Mapping[str, Replacement]) -> None:
    """Replaces methods of an optimizer's class in DeepSpeed's own classes among its bases.

    Not in a subclass, so that a subclass's code around DeepSpeed's still runs. Among classes that
    DeepSpeed does not have, the first definition is the one in use.
    """
    deepspeeds = [owner for owner in optimizer_class.__mro__ if owner in zero3_classes()]
    for name, replacement in replacements.items():
        owners = [owner for owner in deepspeeds or optimizer_class.__mro__ if name in vars(owner)]
        for owner in owners if deepspeeds else owners[:1]:
            hook(owner, name, replacement)


def hook(owner: type, name: str, replacement: Replacement) -> None:
    """Replaces one method. Doing it again does nothing, while ours is in place or wrapped by others."""
    original = vars(owner)[name]
    if _leads_to_ours(original):
        return

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    _originals[hooked] = original
    active.add((owner, name))
    setattr(owner, name, hooked)


def is_ours(function: Any) -> bool:
    """Whether this is a function of ours itself, and not somebody's that may lead to one."""
    return isinstance(function, Hashable) and function in _originals


def remove_all() -> None:
    """Gives every method back, except where somebody else has wrapped ours: there it stays."""
    for owner, name in list(active):
        function = vars(owner)[name]
        while function in _originals:
            function = _originals[function]
        setattr(owner, name, function)
        if not _leads_to_ours(function):
            active.discard((owner, name))


def _leads_to_ours(function: Any, depth: int = 8) -> bool:
    """Whether this is a function of ours, or wraps one: by ``__wrapped__``, or in its closure."""
    if function in _originals:
        return True
    inner = [getattr(function, "__wrapped__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet
            inner.append(cell.cell_contents)
    functions = [each for each in inner if callable(each) and isinstance(each, Hashable)]
    return depth > 0 and any(_leads_to_ours(each, depth - 1) for each in functions)
