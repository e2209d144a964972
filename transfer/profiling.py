"""Named ranges in torch's profiler and in the accelerator's (NVTX on CUDA)."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch.profiler

from accelerators import Accelerator

_NOTHING = nullcontext()


def named_range(accelerator: Accelerator | None, name: str) -> AbstractContextManager[Any]:
    """Marks a block as ``h2d/<name>``. Costs next to nothing where nobody listens.

    Args:
        accelerator: Its ``range_push`` and ``range_pop`` are called where it has them, as DeepSpeed's
            accelerators do. They are not part of the protocol.
        name: Such as ``"pinned_staged"``.
    """
    push, pop = getattr(accelerator, "range_push", None), getattr(accelerator, "range_pop", None)
    pushes, profiles = push is not None and pop is not None, torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return _Range(f"h2d/{name}", push if pushes else None, pop, profiles) if pushes or profiles else _NOTHING


class _Range(ExitStack):
    def __init__(self, name: str, push: Any, pop: Any, profiles: bool) -> None:
        super().__init__()
        self._name, self._push, self._pop, self._profiles = name, push, pop, profiles

    def __enter__(self) -> _Range:
        if self._profiles:
            self.enter_context(torch.profiler.record_function(self._name))
        if self._push is not None:
            self._push(self._name)
            self.callback(self._pop)
        return self
