"""CPU Adam tile by tile, so that a copy-back starts before the update has ended.

Nothing hides the copy of the last sub-group, nor that of one on NVMe. DeepSpeed's CPU Adam updates elements one by
one, so a partition can be updated in parts: each part is copied while the next is updated. Each tile is half of what
is left, so that only a small rest is exposed. Each tile but the last is a multiple of every vector width, so that the
op's vector code and scalar tail meet at the same element: the bits are those of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .stage3 import replacing_op

#: Tiles begin at multiples of this many elements: far above 8 registers of 16 values, the op's stride.
ALIGNMENT_ELEMENTS = 2**16
#: The least elements of a tile: a rest of less than two such tiles is one. 2^21 elements are copied in about 0.2 ms.
SMALLEST_ELEMENTS = 2**21


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


@contextmanager
def updating_in_tiles(optimizer: Any, master: Any, submit: Callable[[int, int], None]) -> Iterator[None]:
    """Within the block, the update of ``master`` is made in tiles.

    Args:
        optimizer: A CPU Adam of which ``updates_in_parts`` holds.
        master: The flat fp32 partition.
        submit: Called with offset and length of each tile after it was updated.
    """

    def update(original: Callable[..., Any], *arguments: Any) -> Any:
        *scalars, parameters, gradients, first_moments, second_moments = arguments
        tensors = (parameters, gradients, first_moments, second_moments)
        is_master = parameters.data_ptr() == master.data_ptr() and parameters.numel() == master.numel()
        if not is_master or not all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in tensors):
            return original(*arguments)
        end = 0
        try:
            for offset, length in plan_tiles(parameters.numel()):
                tile = [tensor.narrow(0, offset, length) for tensor in tensors]
                # Before the update: Ctrl-C while the op runs is raised when it has ended, and nothing comes in between.
                end = offset + length
                original(*scalars, *tile)
                submit(offset, length)
        except BaseException:
            # The optimizer has counted the step: a master that is updated in part would stay wrong.
            if end < parameters.numel():
                original(*scalars, *(tensor.narrow(0, end, tensor.numel() - end) for tensor in tensors))
            raise
        return None

    with replacing_op(optimizer, update):
        yield
