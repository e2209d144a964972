"""The step as a stream of tiles: a tile is updated while those before it are on their way to the device.

For each tile, the gradient is made in a buffer that stays in the caches of the host, and CPU Adam updates the tile.
Several tiles are one copy, as each copy costs the host some time; near the end of a master, half of what is left, so
that only a small rest is copied when all is updated. Within the host, each tile is a copy.

DeepSpeed's CPU Adam updates elements one by one, so a master can be updated in parts. Each tile but the last is a
multiple of every vector width, so that the op's vector code and scalar tail meet at the same element: the bits are
those of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..interface import HostToDeviceTransfer
from ..measured.profile import MachineProfile
from ..routing import RoutedTransfer
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


def profile_of(transfer: HostToDeviceTransfer) -> MachineProfile | None:
    """The machine's profile, where ``strategy: measured`` uses one; else None."""
    return transfer.policy.profile if isinstance(transfer, RoutedTransfer) else None


def tile_elements(transfer: HostToDeviceTransfer) -> int:
    """The elements of a tile: those of the machine's profile, else the default."""
    profile = profile_of(transfer)
    optimizer = None if profile is None else profile.optimizer
    return default_tile_elements() if optimizer is None else optimizer.tile_elements


def aligned(elements: int) -> int:
    """Rounded down to a multiple of ``ALIGNMENT_ELEMENTS``, but not to none."""
    return max(1, elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def plan_tiles(numel: int, tile_elements: int) -> Iterator[tuple[int, int]]:
    """Yields ``(offset, length)`` in elements, in order, covering ``range(numel)`` exactly once."""
    step = aligned(tile_elements)
    for offset in range(0, max(1, numel), step):
        yield offset, min(step, numel - offset)


class Tiles(Protocol):
    """Where the state of a master is, and where it goes."""

    def take(self, offset: int, length: int) -> tuple[Tensor, ...]:
        """The parts of parameters, first and second moments that the next tile has. Blocks until they are in memory."""

    def updated(self, offset: int, length: int, *, copy: bool) -> None:
        """Called for each tile that was taken and updated; ``copy``: its parameters go to the device.

        After an error or an interrupt of such a call, it comes again, without ``copy``.
        """


class MemoryTiles:
    """State that stays in host memory.

    Args:
        state: Parameters, first and second moments: flat, equally long.
        submit: Called with offset and length of what was updated and is to be copied.
        copy_elements: The most elements of a copy, rounded up to whole tiles.
    """

    def __init__(self, state: Sequence[Tensor], submit: Callable[[int, int], None], copy_elements: int) -> None:
        self._state, self._submit, self._copy_elements = state, submit, copy_elements
        self._begin = 0  # of what is not submitted yet

    def take(self, offset: int, length: int) -> tuple[Tensor, ...]:
        return tuple(tensor.narrow(0, offset, length) for tensor in self._state)

    def updated(self, offset: int, length: int, *, copy: bool) -> None:
        end = offset + length
        if copy and end - self._begin >= min(self._copy_elements, self._state[0].numel() - end):
            self._submit(self._begin, end - self._begin)
            self._begin = end


#: Makes the tiles of an update from its arguments: parameters, first and second moments. None: it is another update.
MakeTiles = Callable[..., "Tiles | None"]


class TileStream:
    """Updates masters tile by tile.

    Attributes:
        tile_elements: The elements of a tile, rounded down to a multiple of ``ALIGNMENT_ELEMENTS``, but not to none.
    """

    def __init__(self, tile_elements: int) -> None:
        self.tile_elements = tile_elements
        self._scratch: Tensor | None = None  # for the gradient of one tile

    def updating(
        self, optimizer: Any, master: Any, submit: Callable[[int, int], None], copy_elements: int
    ) -> AbstractContextManager[None]:
        """A block in which the update of ``master`` is made in tiles; see ``passing`` and ``MemoryTiles``.

        Args:
            optimizer: A CPU Adam of which ``updates_in_parts`` holds.
            master: The flat fp32 partition, in memory.
            submit: Called with offset and length of what was updated and is to be copied.
            copy_elements: The most elements of a copy, rounded up to whole tiles.
        """

        def make_tiles(*state: Tensor) -> Tiles | None:
            is_master = state[0].data_ptr() == master.data_ptr() and state[0].numel() == master.numel()
            is_flat = all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in state)
            return MemoryTiles(state, submit, copy_elements) if is_master and is_flat else None

        return self.passing(optimizer, make_tiles)

    @contextmanager
    def passing(self, optimizer: Any, make_tiles: MakeTiles) -> Iterator[None]:
        """Within the block, updates by ``optimizer`` are made in tiles, where ``make_tiles`` has some.

        Args:
            optimizer: A CPU Adam of which ``updates_in_parts`` holds.
            make_tiles: See ``MakeTiles``.
        """

        def update(original: Callable[..., Any], *arguments: Any) -> Any:
            *scalars, parameters, gradients, first_moments, second_moments = arguments
            tiles = make_tiles(parameters, first_moments, second_moments)
            if tiles is None:
                gradients = gradients.hold() if isinstance(gradients, LazyGradient) else gradients
                return original(*scalars, parameters, gradients, first_moments, second_moments)
            self._update(tiles, gradients, lambda *tile: original(*scalars, *tile))
            return None

        with replacing_op(optimizer, update):
            yield

    def _update(self, tiles: Tiles, gradients: Tensor, update: Callable[..., Any]) -> None:
        numel = gradients.numel()
        updated = submitted = 0  # elements
        try:
            for offset, length in plan_tiles(numel, self.tile_elements):
                parameter, *moments = tiles.take(offset, length)
                gradient = self._gradient(gradients, offset, length)
                # Before the update: Ctrl-C while the op runs is raised when it has ended; nothing comes in between.
                updated = offset + length
                update(parameter, gradient, *moments)
                tiles.updated(offset, length, copy=True)
                submitted = updated
        except BaseException:
            # The optimizer has counted the step: a master that is updated in part would stay wrong.
            if submitted < updated:
                tiles.updated(submitted, updated - submitted, copy=False)
            for offset, length in plan_tiles(numel - updated, self.tile_elements):
                if length:
                    parameter, *moments = tiles.take(updated + offset, length)
                    update(parameter, self._gradient(gradients, updated + offset, length), *moments)
                    tiles.updated(updated + offset, length, copy=False)
            raise

    def _gradient(self, gradients: Tensor, offset: int, length: int) -> Tensor:
        """The gradient of a tile, in memory."""
        if not isinstance(gradients, LazyGradient):
            return gradients.narrow(0, offset, length)
        if self._scratch is None or self._scratch.numel() < length:
            elements = max(length, min(self.tile_elements, gradients.numel()))
            self._scratch = torch.empty(elements, dtype=gradients.dtype, device="cpu")  # whatever the defaults are
        return gradients.owner.read(gradients.offset + offset, length, self._scratch)
