"""Faults: counts the calls that a program makes on an accelerator, and makes one of them raise."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ..protocol import Accelerator

#: For ``failing``: every method.
ANY_METHOD = "*"

#: The methods whose results have methods that count too, and what those are called.
_MAKES = {"Event": "Event", "Stream": "Stream", "current_stream": "Stream"}
#: By the protocol this one never raises.
_NEVER_RAISES = "unavailable_reason"


@contextmanager
def failing(
    accelerator: Accelerator, method: str, error: BaseException, *, after: int = 0, times: int = 1
) -> Iterator[list[str]]:
    """Makes a public method of one accelerator raise, within the block, before it does anything.

    To fail every call that a program makes in turn, raise ``after`` by one until fewer calls than that are made::

        while True:
            with failing(accelerator, ANY_METHOD, error, after=k) as calls:
                ...
            if len(calls) <= k:
                break

    Args:
        accelerator: Any object whose attributes can be set.
        method: A method such as ``"enqueue_copy"``; ``"Event.record"`` or ``"Stream.synchronize"`` for the objects
            that ``Event()``, ``Stream()`` and ``current_stream()`` return; or ``ANY_METHOD`` for every public method
            of all of them. Methods of events and streams whose attributes cannot be set are left alone.
        error: What is raised.
        after: Calls that still work first. A call that another counted call makes on its way is a part of that one.
        times: Calls that raise then; later ones work again.

    Yields:
        A list that grows by the method's name with each call, raising or not.
    """
    with ExitStack() as undo:
        faults = _Faults(method, error, range(after, after + times), undo)
        if method != ANY_METHOD:
            getattr(accelerator, method.partition(".")[0])  # a misspelt name is an error
        faults.watch(accelerator)
        try:
            yield faults.calls
        finally:
            faults.active = False


class _Faults:
    """The replaced methods of one block."""

    def __init__(self, method: str, error: BaseException, failing: range, undo: ExitStack) -> None:
        self.calls: list[str] = []
        self.active = True  # objects that were made in the block may be used after it
        self._method = method
        self._error = error
        self._failing = failing
        self._undo = undo
        self._here = threading.local()
        self._watched: dict[int, Any] = {}  # keeps them alive, so that an identity stays theirs

    def watch(self, owner: Any, prefix: str = "") -> None:
        """Replaces the public methods of ``owner`` that are counted, or that make what has counted ones."""
        if id(owner) in self._watched:
            return
        self._watched[id(owner)] = owner
        for name in _public_methods(owner):
            made = "" if prefix else _MAKES.get(name, "")
            counted = self._counts(prefix + name)
            if counted or (made and self._method.startswith(made + ".")):
                wrapper = self._wrapper(getattr(owner, name), prefix + name if counted else "", made)
                with suppress(AttributeError, TypeError):  # of a class in C
                    self._replace(owner, name, wrapper)

    def _counts(self, method: str) -> bool:
        return self._method == method or (self._method == ANY_METHOD and method != _NEVER_RAISES)

    def _wrapper(self, call: Callable[..., Any], counted: str, made: str) -> Callable[..., Any]:
        @functools.wraps(call, assigned=())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active or getattr(self._here, "inside", False):
                return call(*args, **kwargs)
            if counted:
                self.calls.append(counted)
                if len(self.calls) - 1 in self._failing:
                    raise self._error
            self._here.inside = bool(counted)
            try:
                result = call(*args, **kwargs)
            finally:
                self._here.inside = False
            if made and result is not None:
                self.watch(result, made + ".")
            return result

        return wrapper

    def _replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        own = vars(owner)
        undo = (
            functools.partial(setattr, owner, name, own[name])
            if name in own
            else functools.partial(delattr, owner, name)
        )
        setattr(owner, name, wrapper)
        self._undo.callback(undo)


def _public_methods(owner: Any) -> list[str]:
    names = dict.fromkeys([*dir(type(owner)), *getattr(owner, "__dict__", ())])
    return [name for name in names if not name.startswith("_") and callable(getattr(owner, name))]
