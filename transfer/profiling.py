"""Named ranges in torch's profiler and in the accelerator's (NVTX on CUDA)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.profiler

from accelerators import Accelerator


@contextmanager
def named_range(accelerator: Accelerator | None, name: str) -> Iterator[None]:
    """Marks the block as ``h2d/<name>``. Costs a few microseconds.

    Args:
        accelerator: Its ``range_push`` and ``range_pop`` are called where it has them, as DeepSpeed's
            accelerators do. They are not part of the protocol.
        name: Such as ``"pinned_staged"``.
    """
    name = f"h2d/{name}"
    push, pop = getattr(accelerator, "range_push", None), getattr(accelerator, "range_pop", None)
    with torch.profiler.record_function(name):
        if push is None or pop is None:
            yield
            return
        push(name)
        try:
            yield
        finally:
            pop()
