"""Methods of classes, replaced and given back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

#: A decorator: takes the method that it replaces, and returns the function that takes its place.
Patch = Callable[[Callable[..., Any]], Callable[..., Any]]

#: What is replaced now: class or module, and name.
active: set[tuple[Any, str]] = set()

#: Each function that replaces a method, and the method.
_originals: dict[Any, Callable[..., Any]] = {}


def patch_class(cls: type, known: list[type], patches: Mapping[str, Patch]) -> None:
    """Replaces methods of ``cls`` in those of its bases that are ``known``.

    Subclasses of ``known`` keep their methods, so that their code around DeepSpeed's still runs. Where no base is
    known, the first definition of each method is replaced, as it is the one in use.
    """
    bases = [owner for owner in cls.__mro__ if owner in known]
    for name, decorator in patches.items():
        owners = [owner for owner in bases or cls.__mro__ if name in vars(owner)]
        for owner in owners if bases else owners[:1]:
            patch(owner, name, decorator)


def patch(owner: Any, name: str, decorator: Patch) -> None:
    """Replaces one method, or function of a module. Idempotent, also where other code has wrapped the replacement."""
    original = vars(owner)[name]
    if _leads_to_patch(original):
        return
    patched = functools.wraps(original)(decorator(original))
    _originals[patched] = original
    active.add((owner, name))
    setattr(owner, name, patched)


def is_patched(function: Any) -> bool:
    """Whether this very function replaces a method; False for a function that wraps such a one."""
    return isinstance(function, Hashable) and function in _originals


def original(function: Any) -> Any:
    """The method that a function of ours replaces; any other value as it is, also a function that wraps such a one."""
    while is_patched(function):
        function = _originals[function]
    return function


def remove_all() -> None:
    """Restores every method, except where other code has wrapped the patch: there the patch stays."""
    for owner, name in list(active):
        function = vars(owner)[name]
        while function in _originals:
            function = _originals[function]
        setattr(owner, name, function)
        if not _leads_to_patch(function):
            active.discard((owner, name))


def _leads_to_patch(function: Any, depth: int = 8) -> bool:
    """Whether this function is a patch, or wraps one: by ``__wrapped__``, or in its closure."""
    if function in _originals:
        return True
    inner = [getattr(function, "__wrapped__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet
            inner.append(cell.cell_contents)
    functions = [each for each in inner if callable(each) and isinstance(each, Hashable)]
    return depth > 0 and any(_leads_to_patch(each, depth - 1) for each in functions)
