"""The accelerator of a transfer or a policy, resolved when it is first needed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from accelerators import Accelerator, AcceleratorError, get_accelerator
from accelerators.protocol import check_accelerator

from .errors import AcceleratorFailedError, GraphCaptureError

T = TypeVar("T")


class AcceleratorChoice:
    """An accelerator that was given, or named, or that follows ``accelerators.get_accelerator()``.

    Args:
        given: An ``Accelerator``, a registered name, or None to follow. Used by ``resolve`` only.
    """

    def __init__(self, given: Accelerator | str | None = None) -> None:
        self.given = given
        self._checked: Accelerator | None = None

    @property
    def name(self) -> str | None:
        """What was given, by name."""
        return self.given if self.given is None or isinstance(self.given, str) else self.given.name

    def resolve(self) -> Accelerator:
        """The accelerator, checked once for the protocol and for being available.

        Raises:
            AcceleratorFailedError: It is unknown, not an accelerator, or not available here.
        """
        if self._checked is not None and self.given is not None:
            return self._checked
        with accelerator_errors():
            current = self.given if self.given is not None else get_accelerator()
            if isinstance(current, str):
                current = get_accelerator(current)
            if current is not self._checked:
                check_accelerator(current, "the accelerator given is")
                reason = current.unavailable_reason()
                if reason is not None:
                    raise AcceleratorFailedError(f"cannot transfer to {current.name}: {reason}")
                self._checked = current
        return current


def check_capture(accelerator: Accelerator, device_index: int | None) -> None:
    """Refuses to work while a graph is recorded: a wait is an error there, and events from there never answer.

    Raises:
        GraphCaptureError: The current stream of the device records a graph.
    """
    ask = getattr(accelerator, "is_current_stream_capturing", None)
    if ask is not None and ask(device_index):
        raise GraphCaptureError(
            f"the current stream of {accelerator.name} records a graph, which cannot contain copies from the host: "
            "copy before or after the capture"
        )


@contextmanager
def accelerator_errors() -> Iterator[None]:
    """Turns errors of ``accelerators`` into ours, chained. Every other exception passes as it is."""
    try:
        yield
    except AcceleratorError as error:
        raise AcceleratorFailedError(str(error)) from error


def raising_ours(method: Callable[..., T]) -> Callable[..., T]:
    """The same method under ``accelerator_errors``, at the cost of one call: policies ask ``why_not`` on each copy."""

    @functools.wraps(method)
    def converting(*arguments: Any, **options: Any) -> T:
        try:
            return method(*arguments, **options)
        except AcceleratorError as error:
            raise AcceleratorFailedError(str(error)) from error

    return converting


def convert_errors_of(strategy: type, *names: str) -> None:
    """Puts the methods that a class defines itself under ``raising_ours``."""
    for name in names:
        method = vars(strategy).get(name)
        if inspect.isfunction(method):
            setattr(strategy, name, raising_ours(method))
