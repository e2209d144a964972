"""CPU Adam tile by tile, so that a copy-back starts before the update has ended.

Behind the last sub-group, and behind each one on NVMe, nothing is left to hide its copy. DeepSpeed's CPU
Adam updates elements one by one, so a partition may be updated in parts: after each, the part is on its way
while the next is updated. Tiles are halves of what is left, so that what nothing hides is a small rest. The
op's own loop has the same boundaries between vector code and the scalar tail, as each tile but the last is
a multiple of every vector width: the bits are those of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Tiles begin at multiples of this many elements: far above 8 registers of 16 values, the op's stride.
ALIGNMENT_ELEMENTS = 2**16
#: What is left when a tile would be smaller goes as a whole: 2^21 elements cross in about 0.2 ms.
SMALLEST_ELEMENTS = 2**21
#: From this version on, an update with the step number of the one before leaves the op's state alone; before
#: it, each update moves the state on (``csrc/includes/cpu_adam.h``, IncrementStep).
_SINCE = (0, 19, 3)
#: Whose functions may make up ``DeepSpeedCPUAdam.step``: anybody else's might change the result after it.
_KNOWN_MODULES = {
    "deepspeed.ops.adam.cpu_adam",
    "torch.optim.lr_scheduler",
    "torch.optim.optimizer",
    "torch.utils._contextlib",
}


def plan_tiles(numel: int) -> Iterator[tuple[int, int]]:
    """Yields ``(offset, length)`` in elements, in order, covering ``range(numel)`` exactly once."""
    offset = 0
    while numel - offset >= 2 * SMALLEST_ELEMENTS:
        length = (numel - offset) // 2 // ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS
        if length == 0:
            break
        yield offset, length
        offset += length
    yield offset, numel - offset


def can_tile(optimizer: Any) -> bool:
    """Whether the optimizer is one whose update may be cut, and whose result nobody changes after it.

    Args:
        optimizer: What ZeRO-3 calls ``step`` of.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return (
        type(optimizer) is DeepSpeedCPUAdam
        and hasattr(optimizer, "ds_opt_adam")
        and _version() >= _SINCE
        and not has_post_hooks(optimizer)
        and _is_known(optimizer.step)
        and _is_known(DeepSpeedCPUAdam.step)
    )


def has_post_hooks(optimizer: Any) -> bool:
    """Whether torch calls somebody's code after each step of this optimizer."""
    from torch.optim import optimizer as torch_optimizer

    return bool(getattr(optimizer, "_optimizer_step_post_hooks", None)) or bool(
        getattr(torch_optimizer, "_global_optimizer_post_hooks", None)
    )


@contextmanager
def updating_in_tiles(optimizer: Any, master: Any, submit: Callable[[int, int], None]) -> Iterator[None]:
    """Within the block, the update of ``master`` is made in tiles.

    Args:
        optimizer: One that ``can_tile``.
        master: The flat fp32 partition.
        submit: Called with offset and length of each tile after it was updated.
    """
    op = optimizer.ds_opt_adam
    try:
        optimizer.ds_opt_adam = _TiledOp(op, master, submit)
        yield
    finally:
        optimizer.ds_opt_adam = op


class _TiledOp:
    """DeepSpeed's op, whose ``adam_update`` of one tensor is made in tiles."""

    def __init__(self, op: Any, master: Any, submit: Callable[[int, int], None]) -> None:
        self._op, self._master, self._submit = op, master, submit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def adam_update(self, *arguments: Any) -> Any:
        *scalars, parameters, gradients, first_moments, second_moments = arguments
        tensors = (parameters, gradients, first_moments, second_moments)
        is_master = parameters.data_ptr() == self._master.data_ptr() and parameters.numel() == self._master.numel()
        if not is_master or not all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in tensors):
            return self._op.adam_update(*arguments)
        end, update = 0, self._op.adam_update
        try:
            for offset, length in plan_tiles(parameters.numel()):
                tile = tuple(tensor.narrow(0, offset, length) for tensor in tensors)
                # Before the update: Ctrl-C while the op runs is raised when it has ended, and nothing comes in between.
                end = offset + length
                update(*scalars, *tile)
                self._submit(offset, length)
        except BaseException:
            # The optimizer has counted the step: a master that is updated in part would stay wrong for good.
            if end < parameters.numel():
                rest = (tensor.narrow(0, end, tensor.numel() - end) for tensor in tensors)
                self._op.adam_update(*scalars, *rest)
            raise
        return None


def _is_known(function: Any) -> bool:
    """Whether a function and all that it wraps were written by DeepSpeed or torch."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if getattr(function, "__globals__", {}).get("__name__") not in _KNOWN_MODULES:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@functools.cache
def _version() -> tuple[int, ...]:
    import deepspeed

    return tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
