"""Base of strategies that hold memory: one submit or close at a time, and a clean way out of each."""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from accelerators import Accelerator

from ..accelerator_choice import accelerator_errors
from ..errors import FallbackWarning, StrategyUnavailableError, warn_caller
from ..in_flight import InFlightCopy
from ..interface import HostToDeviceTransfer
from ..schema.model import StrategyConfig
from ..stats import StrategyStats, merged


class Held(Protocol):
    """What a strategy holds: buffers, streams, registrations. In a fork it holds nothing."""

    def mark(self) -> None:
        """From now on everything that is held is to be given back, and is not used by a new copy."""

    def release(self) -> None:
        """Waits for the copies that use what is marked, and gives it back.

        What a failure leaves stays marked. May be entered again while it runs.
        """


class ExclusiveTransfer(HostToDeviceTransfer):
    """A strategy whose threads take turns.

    Subclasses make ``_held`` and ``_stand_in`` before they call ``__init__`` of this class, and write
    ``_cross``. A submit from inside another one of the same thread (a signal handler, a finalizer) goes
    to ``_stand_in``, as do copies that do not cross from the host to the device; a close from there is
    done when the outer submit ends.
    """

    _held: Held
    _stand_in: HostToDeviceTransfer
    _owns_stand_in: bool = True

    def __init__(
        self,
        config: StrategyConfig | Mapping[str, Any] | None = None,
        accelerator: Accelerator | str | None = None,
        *,
        fallback: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(config, accelerator, fallback=fallback, **options)
        self._lock = threading.RLock()
        self._busy = False  # a submit or close is under way in the thread that holds the lock
        self._refused_by: Accelerator | None = None
        self._refusal = ""
        # Runs when this object is dropped, and at exit while the accelerator still works.
        weakref.finalize(self, _release_all, self._held)

    def share_stand_in(self, strategy: Callable[[str], HostToDeviceTransfer]) -> None:
        """Takes the stand-in from the one who holds every strategy, who then closes and counts it.

        Args:
            strategy: Gives the strategy of a name.
        """
        self._stand_in = strategy(self._stand_in.name)
        self._owns_stand_in = False

    @property
    def pinned_bytes(self) -> int:
        return self._stand_in.pinned_bytes if self._owns_stand_in else 0

    def stats(self) -> dict[str, StrategyStats]:
        return merged(super().stats(), self._stand_in.stats() if self._owns_stand_in else {})

    def close(self) -> None:
        if self._is_forked:  # another thread of the parent may have held the lock
            return
        with self._lock:
            self._held.mark()
            if self._busy:  # inside a submit or close of this thread, which releases what is marked before it ends
                return
            try:
                self._busy = True
                with accelerator_errors():
                    self._held.release()
            finally:
                self._busy = False
        if self._owns_stand_in:
            self._stand_in.close()

    def _submit(self, destination: Tensor, source: Any) -> InFlightCopy:
        accelerator = self.accelerator
        if not self._crosses(accelerator, destination, source):
            return self._pass_on(self._stand_in, destination, source)
        with self._lock:
            if self._busy:
                return self._cross_inside(accelerator, destination, source)
            try:
                self._busy = True
                copy = self._cross(accelerator, destination, source)
                self._held.release()
                return copy
            except BaseException:
                with contextlib.suppress(Exception):  # what stays held, the next close tries again
                    self._held.release()
                raise
            finally:
                self._busy = False

    def _crosses(self, accelerator: Accelerator, destination: Tensor, source: Any) -> bool:
        """Whether this copy is one for ``_cross``."""
        return accelerator.on_device(destination) and accelerator.on_host(source)

    @abstractmethod
    def _cross(self, accelerator: Accelerator, destination: Tensor, source: Any) -> InFlightCopy:
        """Starts a copy from the host to the device; one at a time."""

    def _cross_inside(self, accelerator: Accelerator, destination: Tensor, source: Any) -> InFlightCopy:  # noqa: ARG002
        """Makes a copy that was asked for inside another one, and so uses nothing that is held."""
        return self._pass_on(self._stand_in, destination, source)

    def _refuse(self, accelerator: Accelerator, refusal: str, cause: BaseException | None = None) -> None:
        """Remembers for good why this strategy cannot run on ``accelerator``; warns once, or raises."""
        self._refused_by = accelerator
        self._refusal = refusal
        self._require_fallback(refusal, cause)
        self._warn_of_stand_in(refusal)

    def _require_fallback(self, refusal: str, cause: BaseException | None = None) -> None:
        if not self.fallback:
            raise StrategyUnavailableError(refusal) from cause

    def _warn_of_stand_in(self, refusal: str) -> None:
        stand_in = self._stand_in.name
        warn_caller(
            f"{refusal} This transfer now uses `{stand_in}`, which is slower; `fallback: false` makes this an error.",
            FallbackWarning,
        )


def _release_all(held: Held) -> None:
    held.mark()
    held.release()
