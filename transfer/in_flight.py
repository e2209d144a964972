"""Copies that were submitted and may not be finished."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .accelerator_choice import accelerator_errors


class InFlightCopy:
    """What ``submit`` returns. This class itself stands for a copy that is finished already.

    A strategy whose copies finish later returns a subclass. Dropping the object without waiting is
    safe for the strategy's own memory; the destination must not be read before a wait.
    """

    def wait(self) -> None:
        """Blocks the host until the destination holds the values. Idempotent.

        Raises:
            Exception: What the accelerator reports about this copy. The destination's elements are
                then each the old or the new value; waiting again asks again.
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


class EventCopy(InFlightCopy):
    """A copy that is finished when an event is, and whose source was read during ``submit``.

    Keeps the destination alive until somebody has seen the copy finished.
    """

    def __init__(self, event: Any, destination: Tensor) -> None:
        self._pending: tuple[Any, Tensor] | None = (event, destination)

    def wait(self) -> None:
        pending = self._pending
        if pending is not None:
            with accelerator_errors():
                pending[0].synchronize()
            self._pending = None

    def order_after(self, stream: Any) -> None:
        pending = self._pending
        if pending is None:
            return
        if stream is None:
            self.wait()
        else:
            with accelerator_errors():
                stream.wait_event(pending[0])

    @property
    def done(self) -> bool:
        pending = self._pending
        if pending is not None:
            with accelerator_errors():
                if pending[0].query():
                    self._pending = None
        return self._pending is None


#: Shared by every copy that had nothing to do or was finished when ``submit`` returned.
FINISHED = InFlightCopy()
