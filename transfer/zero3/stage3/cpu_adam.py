"""DeepSpeed's CPU Adam: whether it updates in parts, and another update in place of its op's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from packaging.version import Version

from .versions import deepspeed_version

#: From this version on, a CPU Adam update with the step number of the one before leaves the op's state alone; before
#: it, each update moves the state on (``csrc/includes/cpu_adam.h``, IncrementStep).
_PARTS_SINCE = Version("0.19.3")


def updates_in_parts(cpu_optimizer: Any) -> bool:
    """Whether this is DeepSpeed's CPU Adam, and its op may update a partition in parts."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    is_cpu_adam = type(cpu_optimizer) is DeepSpeedCPUAdam and hasattr(cpu_optimizer, "ds_opt_adam")
    return is_cpu_adam and deepspeed_version() >= _PARTS_SINCE


def level_steps(cpu_optimizer: Any) -> None:
    """Gives all masters the count of steps of the one that has most."""
    states = [state for state in cpu_optimizer.state.values() if "step" in state]
    most = max((state["step"] for state in states), default=0)
    for state in states:
        state["step"] = most


@contextlib.contextmanager
def replacing_op(cpu_optimizer: Any, update: Callable[..., Any]) -> Iterator[None]:
    """Within the block, ``update(original, *arguments)`` runs in place of each update by CPU Adam's op.

    The arguments are the op's: scalars, then parameters, gradients, first and second moments.
    """
    op = cpu_optimizer.ds_opt_adam
    try:
        cpu_optimizer.ds_opt_adam = _Op(op, update)
        yield
    finally:
        cpu_optimizer.ds_opt_adam = op


class _Op:
    """DeepSpeed's op with another update."""

    def __init__(self, op: Any, update: Callable[..., Any]) -> None:
        self._op, self._update = op, update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def adam_update(self, *arguments: Any) -> Any:
        return self._update(self._op.adam_update, *arguments)
