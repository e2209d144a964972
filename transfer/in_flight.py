"""Copies that were submitted and may not be finished."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accelerators import Accelerator, AcceleratorError

from .accelerator_choice import accelerator_errors
from .errors import AcceleratorFailedError, GraphCaptureError, StrategyUnavailableError
from .stats import Counters, format_bytes


class InFlightCopy:
    """What ``submit`` returns. This class itself is a finished copy.

    A strategy whose copies finish later returns a subclass. Dropping the object without waiting is
    safe for the strategy's own memory; the destination must not be read before a wait.
    """

    def wait(self) -> None:
        """Blocks the host until the destination holds the values. Idempotent.

        Raises:
            Exception: What the accelerator reports about this copy. The destination's elements are
                then each the old or the new value. The device is idle, and waiting again returns at once; where the
                device cannot be waited for either, waiting again asks again.
            VerificationError: ``verify`` is configured, and the destination holds other values. Raised once.
        """

    def order_after(self, stream: Any) -> None:
        """Makes work queued on ``stream`` from now on see the destination; does not block the host.

        Args:
            stream: A stream of the destination's accelerator. None, where the accelerator has no
                streams, blocks as ``wait`` does.
        """

    def release_source(self) -> None:
        """Blocks the host until the source may be changed or freed.

        Returns at once for strategies that are done with the source when ``submit`` returns.
        """

    @property
    def done(self) -> bool:
        """Whether the destination holds the values; does not block."""
        return True

    def __repr__(self) -> str:
        state = ": finished" if type(self) is InFlightCopy else ""  # a subclass knows more
        return f"<{type(self).__name__}{state}>"


class EventCopy(InFlightCopy):
    """A copy that is finished when its events are.

    Keeps the destination, and the source where it is still read, alive until ``wait`` or ``done`` has seen
    the copy finished.

    Args:
        events: The event after which the destination holds the values, or several of them.
        destination: What is written.
        source: What is still read, for strategies that read it after ``submit`` has returned: the source,
            or whatever else must live as long as the copy.
        counters: Where the seconds that ``wait`` blocks are counted.
        accelerator: Waited for where an event cannot be asked. None: ``wait`` raises, and asks again next time.
    """

    def __init__(
        self,
        events: Any | Sequence[Any],
        destination: Tensor,
        source: Any = None,
        counters: Counters | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        several = tuple(events) if isinstance(events, Sequence) else (events,)
        self._pending: tuple[tuple[Any, ...], Tensor, Any] | None = (several, destination, source)
        self._counters = counters
        self._accelerator = accelerator

    def wait(self) -> None:
        try:
            self.synchronize()
        except Exception as error:
            pending = self._pending
            if self._accelerator is not None and pending is not None:
                with contextlib.suppress(Exception):
                    self._accelerator.synchronize(pending[1].device.index)
                    self._pending = None
            if isinstance(error, AcceleratorError):
                raise AcceleratorFailedError(str(error)) from error
            raise

    def synchronize(self) -> None:
        """As ``wait``, of the events alone: after an error the copy is what it was, and nothing else was waited for."""
        pending = self._pending
        if pending is None:
            return
        started = time.perf_counter()
        try:
            for event in pending[0]:
                event.synchronize()
            self._pending = None
        finally:
            if self._counters is not None:
                self._counters.add(wait_seconds=time.perf_counter() - started)

    def order_after(self, stream: Any) -> None:
        pending = self._pending
        if pending is None:
            return
        if stream is None:
            self.wait()
            return
        with accelerator_errors():
            for event in pending[0]:
                stream.wait_event(event)

    def release_source(self) -> None:
        pending = self._pending
        if pending is not None and pending[2] is not None:
            self.wait()

    @property
    def done(self) -> bool:
        pending = self._pending
        if pending is not None:
            with accelerator_errors():
                if all(event.query() for event in pending[0]):
                    self._pending = None
        return self._pending is None

    def __repr__(self) -> str:
        # Asks no event: that would spoil a graph that is being captured.
        pending = self._pending
        if pending is None:
            return f"<{type(self).__name__}: finished>"
        _, destination, source = pending
        reads = "" if source is None else ", reads its source"
        what = f"{format_bytes(destination.nbytes)} to {destination.device}"
        return f"<{type(self).__name__}: not waited for, {what}{reads}>"


def made(accelerator: Accelerator, kind: str) -> Any:
    """A new ``Event`` or ``Stream``.

    Raises:
        StrategyUnavailableError: The vendor's class takes arguments, against the protocol.
    """
    try:
        return getattr(accelerator, kind)()
    except TypeError as error:
        raise StrategyUnavailableError(
            f"{accelerator.name} makes no {kind} without arguments, as every strategy needs it ({error})."
        ) from error


def finish_stream(accelerator: Accelerator, stream: Any, device_index: int | None) -> None:
    """Blocks the host until what is queued on a stream is done; without streams, what is queued on the device."""
    if stream is not None:
        stream.synchronize()
    elif accelerator.capabilities.copies_asynchronously:
        accelerator.synchronize(device_index)


def finished_copy(accelerator: Accelerator, destination: Tensor, source: Tensor, counters: Counters) -> InFlightCopy:
    """``destination.copy_(source)`` on the current stream of the destination's device; blocks until it has ended."""
    started = time.perf_counter()
    index = destination.device.index
    stream = accelerator.current_stream(index)
    with accelerator.stream(stream):
        accelerator.enqueue_copy(destination, source)
    finish_stream(accelerator, stream, index)
    counters.add(pieces=1, wait_seconds=time.perf_counter() - started)
    return FINISHED


def drain_after(error: BaseException, accelerator: Accelerator, destination: Any) -> None:
    """Waits for the device, so that nothing is in flight after an error; one of ``accelerators`` becomes ours."""
    if isinstance(error, GraphCaptureError):  # nothing is in flight, and a wait would spoil the graph
        return
    with contextlib.suppress(Exception):
        accelerator.synchronize(destination.device.index)
    if isinstance(error, AcceleratorError):
        raise AcceleratorFailedError(str(error)) from error


#: Shared by every copy that had nothing to do or was finished when ``submit`` returned.
FINISHED = InFlightCopy()
