"""Whether code is DeepSpeed's and torch's own: waits are put off only where nothing else runs in the rest of a step.

Code is known by what runs, not by what it says of itself: ``functools.wraps`` lends a function another's name and
module, but not the namespace and the file that it was compiled in. A function of a known module that holds another one
in its closure, as every decorator's does, is known where that one is. A replacement of ours is known where the method
is that it replaces. Objects that are called and are no functions are known by their class.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from .patching import original

#: The packages, and single modules, whose code may run.
PACKAGES = {"deepspeed", "torch", "transfer"}
#: What these use themselves. ``unittest`` is for replacing other code.
_LIBRARIES = sys.stdlib_module_names - {"unittest"} | {"numpy", "packaging", "pydantic", "tqdm", "typing_extensions"}
#: A decorator of a decorator of ... a function; deeper ones are unknown.
_DEPTH = 8

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class _Answer(NamedTuple):
    """What was found in a class or module: its values and names, and what of it is not known."""

    values: list[Any]
    names: frozenset[str]
    unknown: str | None


_answers: weakref.WeakKeyDictionary[Any, _Answer] = weakref.WeakKeyDictionary()


def unknown_in(thing: object) -> str | None:
    """What of an object's code is not known, for a message, or None.

    That is the functions of its classes, of the modules that define these, and those that the object itself has. Takes
    some ten microseconds where nothing has changed since it was last asked.
    """
    own = getattr(thing, "__dict__", {})
    suspects = {name for name, value in tuple(own.items()) if type(value) in _FUNCTIONS}
    for owner in type(thing).__mro__[:-1]:
        answer = _answer(owner)
        module = sys.modules.get(owner.__module__)
        in_module = None if module is None or owner.__module__ in _LIBRARIES else _answer(module).unknown
        unknown = answer.unknown or in_module
        if unknown is not None:
            return unknown
        suspects.update(own.keys() & answer.names)
    for name in sorted(suspects):
        if not _is_known(own.get(name)):
            return f"`{name}` of this {type(thing).__name__}, which is {_place(own[name])}"
    return None


def step_hooks(optimizer: object) -> str | None:
    """That torch calls a hook around each step of this optimizer, for a message, or None."""
    for kind in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_step_{kind}_hooks", None):
            return f"a step {kind}-hook of {type(optimizer).__name__}"
    return None


def unknown_everywhere() -> str | None:
    """What of other code torch calls in every step: hooks of all optimizers, and active modes."""
    from torch.optim import optimizer
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for kind in ("pre", "post"):
        if getattr(optimizer, f"_global_optimizer_{kind}_hooks", None):
            return f"a step {kind}-hook of all optimizers"
    for mode in (
        *_get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
        *_get_current_dispatch_mode_stack(),
    ):
        if not is_known_module(type(mode).__module__):
            return f"the torch mode {type(mode).__name__}"
    return None


def is_known_module(name: str) -> bool:
    """Whether functions of this module are known."""
    package = name.partition(".")[0]
    return package in PACKAGES or package in _LIBRARIES or name in PACKAGES


def _answer(namespace: Any) -> _Answer:
    """What was found in a class or module as it is now; looks at every value of it only where one has changed."""
    content = vars(namespace)
    answer = _answers.get(namespace)
    if (
        answer is None
        or len(answer.values) != len(content)
        or not all(map(operator.is_, answer.values, content.values()))
    ):
        items = dict(content)
        name = next((name for name, value in items.items() if not _is_known(value)), None)
        unknown = None if name is None else f"`{namespace.__name__}.{name}`, which is {_place(items[name])}"
        answer = _answers[namespace] = _Answer(list(items.values()), frozenset(items), unknown)
    return answer


def _is_known(value: Any, depth: int = _DEPTH) -> bool:
    value = original(value)
    if isinstance(value, property):
        return all(_is_known(each, depth) for each in (value.fget, value.fset, value.fdel))
    if isinstance(value, functools.partial):
        return _is_known(value.func, depth)
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return _is_known(value.__func__, depth)
    if isinstance(value, types.FunctionType):
        return depth > 0 and _is_of_known_module(value) and all(_is_known(each, depth - 1) for each in _closure(value))
    if isinstance(value, type) or not callable(value):
        return True
    return is_known_module(type(value).__module__)


def _is_of_known_module(function: types.FunctionType) -> bool:
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return (
        module is not None
        and vars(module) is function.__globals__
        and function.__code__.co_filename == getattr(module, "__file__", None)
        and is_known_module(module.__name__)
    )


def _closure(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet
            yield cell.cell_contents


def _place(value: Any) -> str:
    """Where a value comes from: ``train.py's `look```."""
    for attribute in ("func", "fget", "__func__"):
        value = getattr(value, attribute, value)
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"`{code.co_name}` of {code.co_filename}:{code.co_firstlineno}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"
