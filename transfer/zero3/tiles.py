"""The step as a stream of tiles: a tile is updated while those before it are on their way to the device.

For each tile, the gradient is made in a buffer that stays in the caches of the host, and CPU Adam updates the tile.
Several tiles are one copy, as each copy costs the host some time; near the end of a master, half of what is left, so
that only a small rest is copied when all is updated. Within the host, each tile is a copy.

DeepSpeed's CPU Adam updates elements one by one, so a master can be updated in parts. Each tile but the last is a
multiple of every vector width, so that the op's vector code and scalar tail meet at the same element: the bits are
those of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .gradients import LazyGradient
from .stage3 import replacing_op

#: Tiles begin at multiples of this many elements: far above 8 registers of 16 values, the op's stride.
ALIGNMENT_ELEMENTS = 2**16
#: The most elements of a copy to the device: 256 MiB of fp32, which take the link 5 ms and CPU Adam 14 ms.
COPY_ELEMENTS = 2**26


def default_tile_elements() -> int:
    """The elements of a tile, where the machine's profile does not tell: 2^20 for each thread of torch's.

    So each thread has 4 MiB of the gradient, which the host's caches hold, and enough to do for the time that starting
    threads takes. Measured with 12 threads of 16 virtual cores beside an H200: a step was 8 to 11% faster with tiles of
    2^24 than with those of 2^22; those of 2^23 were in between.
    """
    return 2**20 * torch.get_num_threads()


def plan_tiles(numel: int, tile_elements: int) -> Iterator[tuple[int, int]]:
    """Yields ``(offset, length)`` in elements, in order, covering ``range(numel)`` exactly once."""
    step = max(1, tile_elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
    for offset in range(0, max(1, numel), step):
        yield offset, min(step, numel - offset)


class TileStream:
    """Updates masters tile by tile.

    Attributes:
        tile_elements: The elements of a tile, rounded down to a multiple of ``ALIGNMENT_ELEMENTS``, but not to none.
    """

    def __init__(self, tile_elements: int) -> None:
        self.tile_elements = tile_elements
        self._scratch: Tensor | None = None  # for the gradient of one tile

    @contextmanager
    def updating(
        self, optimizer: Any, master: Any, submit: Callable[[int, int], None], copy_elements: int
    ) -> Iterator[None]:
        """Within the block, the update of ``master`` is made in tiles.

        Args:
            optimizer: A CPU Adam of which ``updates_in_parts`` holds.
            master: The flat fp32 partition.
            submit: Called with offset and length of what was updated and is to be copied.
            copy_elements: The most elements of a copy, rounded up to whole tiles.
        """

        def update(original: Callable[..., Any], *arguments: Any) -> Any:
            *scalars, parameters, gradients, first_moments, second_moments = arguments
            tensors = (parameters, first_moments, second_moments)
            is_master = parameters.data_ptr() == master.data_ptr() and parameters.numel() == master.numel()
            if not is_master or not all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in tensors):
                gradients = gradients.hold() if isinstance(gradients, LazyGradient) else gradients
                return original(*scalars, parameters, gradients, first_moments, second_moments)
            begin, end, numel = 0, 0, parameters.numel()
            try:
                for offset, length in plan_tiles(numel, self.tile_elements):
                    tile = self._tile(offset, length, parameters, gradients, first_moments, second_moments)
                    # Before the update: Ctrl-C while the op runs is raised when it has ended; nothing comes in between.
                    end = offset + length
                    original(*scalars, *tile)
                    if end - begin >= min(copy_elements, numel - end):
                        submit(begin, end - begin)
                        begin = end
            except BaseException:
                # The optimizer has counted the step: a master that is updated in part would stay wrong.
                for offset, length in plan_tiles(numel - end, self.tile_elements):
                    if length:
                        original(*scalars, *self._tile(end + offset, length, *arguments[-4:]))
                raise
            return None

        with replacing_op(optimizer, update):
            yield

    def _tile(
        self, offset: int, length: int, parameters: Tensor, gradients: Tensor, *moments: Tensor
    ) -> tuple[Tensor, ...]:
        """The parts of all of these that belong to a tile."""
        parameter, *parts = (tensor.narrow(0, offset, length) for tensor in (parameters, *moments))
        if isinstance(gradients, LazyGradient):
            if self._scratch is None or self._scratch.numel() < length:
                self._scratch = torch.empty(max(length, min(self.tile_elements, parameters.numel())))
            return parameter, gradients.owner.read(gradients.offset + offset, length, self._scratch), *parts
        return parameter, gradients.narrow(0, offset, length), *parts
