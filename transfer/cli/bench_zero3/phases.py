"""An iteration in phases, with a synchronize after each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..measuring.ranks import Ranks


class Phases(NamedTuple):
    """Seconds."""

    forward: float
    backward: float
    step: float


def timed(
    forward: Callable[[], Any],
    backward: Callable[[Any], Any],
    step: Callable[[], Any],
    ranks: Ranks,
    accelerator: Any,
    before_step: Callable[[], None] = lambda: None,
) -> Phases:
    """Makes one iteration; ``before_step`` is not counted."""
    started = ranks.start(accelerator)
    loss = forward()
    accelerator.synchronize()
    after_forward = time.perf_counter()
    backward(loss)
    accelerator.synchronize()
    after_backward = time.perf_counter()
    before_step()
    began = ranks.start(accelerator)
    step()
    accelerator.synchronize()
    return Phases(after_forward - started, after_backward - after_forward, time.perf_counter() - began)
