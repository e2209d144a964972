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
_OTHERS = {"cpuinfo", "numpy", "packaging", "pydantic", "tqdm", "typing_extensions"}
_LIBRARIES = {*sys.stdlib_module_names, *_OTHERS} - {"unittest"}
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
        found = _unknown(own.get(name))
        if found is not None:
            return f"`{name}` of this {type(thing).__name__}, which is {_place(found)}"
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
        each = ((name, found) for name, value in items.items() if (found := _unknown(value)) is not None)
        name, found = next(each, ("", None))
        unknown = None if found is None else f"`{namespace.__name__}.{name}`, which is {_place(found)}"
        answer = _answers[namespace] = _Answer(list(items.values()), frozenset(items), unknown)
    return answer


def _unknown(value: Any, depth: int = _DEPTH) -> Any:
    """The code of a value that is not known: a function, or an object that is called; None where all of it is."""
    value = original(value)
    if isinstance(value, property):
        inner = [value.fget, value.fset, value.fdel]
    elif isinstance(value, functools.partial):
        inner = [value.func]
    elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
        inner = [value.__func__]
    elif isinstance(value, types.FunctionType):
        if depth == 0 or not _is_of_known_module(value):
            return value
        inner = list(_closure(value))
    elif isinstance(value, type) or not callable(value) or is_known_module(type(value).__module__):
        return None
    else:
        return value
    return next((found for each in inner if (found := _unknown(each, depth - 1)) is not None), None)


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


def _place(unknown: Any) -> str:
    """Where unknown code is, for a message."""
    code = getattr(unknown, "__code__", None)
    if code is not None:
        return f"`{code.co_name}` of {code.co_filename}:{code.co_firstlineno}"
    return f"a {type(unknown).__module__}.{type(unknown).__qualname__}"
