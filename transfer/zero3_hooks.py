"""Methods of DeepSpeed's classes, replaced and given back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

#: What replaces a method: called with the original first, then with the method's own arguments.
Replacement = Callable[..., Any]

#: For each method that is replaced: the original, and what stands in its place.
active: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}


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
    if (owner, name) in active and _leads_to(original, active[(owner, name)][1]):
        return

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(owner, name, hooked)
    active[(owner, name)] = (original, hooked)


def _leads_to(function: Any, wanted: Callable[..., Any], depth: int = 8) -> bool:
    """Whether ``wanted`` is this function, or what it wraps, by ``__wrapped__`` or in its closure."""
    if function is wanted:
        return True
    inner = [getattr(function, "__wrapped__", None)]
    inner += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return depth > 0 and any(_leads_to(each, wanted, depth - 1) for each in inner if callable(each))


def remove_all() -> None:
    """Gives every method back, except where somebody else has wrapped ours: there it stays."""
    for (owner, name), (original, hooked) in list(active.items()):
        if vars(owner)[name] in (hooked, original):
            setattr(owner, name, original)
            del active[(owner, name)]
