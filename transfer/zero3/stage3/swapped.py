"""A view of the sub-groups whose state DeepSpeed keeps in files, and of their gradients there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .names import SWAP_IN
from .optimizer import Stage3

#: How the files of Adam's two moments are called; DeepSpeed adds the master's name.
_MOMENTS = ("exp_avg-", "exp_avg_sq-")
#: What of a swapper gradients go through. Before 0.19.8, it has no ``_writeback_gradients``: where no gradient is in a
#: file, setting one waits for no write, and the aio op aborts the process.
_NEEDED = ("swap_out_gradients", "swap_params_info", "_writeback_gradients")
#: And of the optimizer, beside ``SWAP_IN``: lets go of the swap buffers.
_LET_GO = "_release_swap_buffers"


@dataclass(frozen=True)
class SwappedState:
    """A view of what DeepSpeed keeps of one swapped sub-group. It keeps no state of its own."""

    stage3: Stage3
    sub_group_id: int

    @property
    def _info(self) -> Any:
        return self.stage3.swap_info(self.sub_group_id)

    @property
    def is_known(self) -> bool:
        """Whether DeepSpeed has a record of it that is as known here."""
        info = self._info
        return info is not None and all(hasattr(info, name) for name in ("swapped_gradients", "unswapped_gradients"))

    def files(self) -> list[str] | None:
        """The paths of the master, the first and the second moments; None while not all of them were written."""
        info = self._info
        tensors = list(getattr(info, "tensors", []))
        paths = [Path(str(getattr(each, "swap_path", ""))) for each in tensors]
        names = [each.name for each in paths[1:]]
        is_adam = len(names) == len(_MOMENTS) and all(map(str.startswith, names, _MOMENTS))
        if not is_adam or not info.has_state_tensors or self.stage3.uses_buffers:
            return None
        return [str(each) for each in paths] if all(each.is_file() for each in paths) else None

    def stand_in(self, numel: int, gradient: Tensor) -> None:
        """Gives the master a size and a gradient, but no memory: what is left of it passes through elsewhere."""
        master = self.stage3.master(self.sub_group_id)
        master.data = torch.zeros(1, dtype=master.dtype, device="cpu").expand(numel)
        master.grad = gradient

    def let_go(self) -> None:
        """Undoes ``stand_in``: as DeepSpeed leaves a master that it has swapped out."""
        master = self.stage3.master(self.sub_group_id)
        master.grad = None
        master.data = torch.empty(0, dtype=master.dtype, device="cpu")

    def show_gradient(self, gradient: Tensor) -> None:
        """Lets DeepSpeed read the gradient of the sub-group from a tensor, and from no file.

        It copies from there when it reads the sub-group's state, and writes to it what somebody has set.
        """
        info = self._info
        info.swapped_gradients, info.unswapped_gradients = {}, {0: gradient}

    def hide_gradient(self) -> None:
        """Lets DeepSpeed know of no gradient."""
        info = self._info
        info.swapped_gradients, info.unswapped_gradients = {}, {}

    @contextlib.contextmanager
    def gradient(self) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
        """Within the block, the gradient is in one of DeepSpeed's swap buffers: with the ranges that were reduced.

        Blocks while the sub-group's state is read. Ranges are begins and ends, in elements; the rest is undefined.
        """
        info, optimizer = self._info, self.stage3.optimizer
        ranges = [(each.offset, each.offset + each.length) for each in info.swapped_gradients.values()]
        ranges += [(begin, begin + each.numel()) for begin, each in info.unswapped_gradients.items()]
        if not ranges:
            yield Tensor(), []
            return
        getattr(optimizer, SWAP_IN)(self.sub_group_id)
        try:
            yield self.stage3.master(self.sub_group_id).grad, ranges
        finally:
            getattr(optimizer, _LET_GO)(self.sub_group_id)


def why_not_received(optimizer: Any) -> str | None:
    """Why gradients of swapped sub-groups cannot stay in memory, as a reason that follows "because", or None."""
    if any(partition is None for partition in optimizer.fp16_partitioned_groups_flat):
        return "parameters are on NVMe too"
    swapper = getattr(optimizer, "optimizer_swapper", None)
    missing = [name for name in _NEEDED if not hasattr(swapper, name)]
    missing += [name for name in (SWAP_IN, _LET_GO) if not hasattr(optimizer, name)]
    return f"there is no `{missing[0]}`" if missing else None


@contextlib.contextmanager
def receiving(optimizer: Any, receive: Callable[[int, int, Tensor], bool]) -> Iterator[None]:
    """Within the block, gradients that would go to files are given to ``receive``.

    Args:
        optimizer: A ZeRO-3 optimizer that swaps.
        receive: Gets the sub-group, where the values begin in its gradient, and the values, on the device. False: they
            go to files.
    """
    swapper = optimizer.optimizer_swapper
    original, before = swapper.swap_out_gradients, vars(swapper).get("swap_out_gradients")
    numbers = {id(master): number for number, master in enumerate(optimizer.fp32_partitioned_groups_flat)}

    def swap_out_gradients(parameter: Any, gradient_offsets: Any, gradient_tensors: Any) -> None:
        number = numbers[id(parameter)]
        pairs = zip(gradient_offsets, gradient_tensors, strict=True)
        rest = [(offset, values) for offset, values in pairs if not receive(number, offset, values)]
        if rest:
            offsets, tensors = map(list, zip(*rest, strict=True))
            original(parameter=parameter, gradient_offsets=offsets, gradient_tensors=tensors)

    swapper.swap_out_gradients = swap_out_gradients
    try:
        yield
    finally:
        if before is None:
            del swapper.swap_out_gradients
        else:
            swapper.swap_out_gradients = before
