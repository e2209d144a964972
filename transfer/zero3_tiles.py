"""CPU Adam tile by tile, so that the last copy-back of a step starts before the update has ended.

Behind the last sub-group nothing is left to hide its copy. DeepSpeed's CPU Adam updates elements one by
one, so a partition may be updated in parts: after each, the part is on its way while the next is
updated. Tiles are halves of what is left, so that what nothing hides is a small rest. The op's own
loop has the same boundaries between vector code and the scalar tail, as each tile but the last is a
multiple of every vector width: the bits are those of one call.
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
#: From this version on, an update with the step number of the one before leaves the op's state alone.
#: Before it, that holds from the second update of a step on (``csrc/includes/cpu_adam.h``, IncrementStep).
_ANY_UPDATE_SINCE = (0, 19, 3)


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


def can_tile(optimizer: Any, updates_before: int) -> bool:
    """Whether the optimizer is one whose update may be cut, and whose result nobody changes after it.

    Args:
        optimizer: What ZeRO-3 calls ``step`` of.
        updates_before: Sub-groups that it has updated in this step.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if type(optimizer) is not DeepSpeedCPUAdam or not hasattr(optimizer, "ds_opt_adam"):
        return False
    own_step = vars(optimizer).get("step")  # torch's learning rate schedulers put a counter there
    if own_step is not None and not getattr(own_step, "_wrapped_by_lr_sched", False):
        return False
    return not _has_post_hooks(optimizer) and (updates_before > 0 or _version() >= _ANY_UPDATE_SINCE)


@contextmanager
def updating_in_tiles(optimizer: Any, master: Any, submit: Callable[[int, int], None]) -> Iterator[None]:
    """Within the block, the update of ``master`` is made in tiles.

    Args:
        optimizer: One that ``can_tile``.
        master: The flat fp32 partition.
        submit: Called with offset and length of each tile after it was updated.
    """
    op = optimizer.ds_opt_adam
    optimizer.ds_opt_adam = _TiledOp(op, master, submit)
    try:
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
        for offset, length in plan_tiles(parameters.numel()):
            self._op.adam_update(*scalars, *(tensor.narrow(0, offset, length) for tensor in tensors))
            self._submit(offset, length)
        return None


def _has_post_hooks(optimizer: Any) -> bool:
    from torch.optim import optimizer as torch_optimizer

    return bool(getattr(optimizer, "_optimizer_step_post_hooks", None)) or bool(
        getattr(torch_optimizer, "_global_optimizer_post_hooks", None)
    )


@functools.cache
def _version() -> tuple[int, ...]:
    import deepspeed

    return tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
