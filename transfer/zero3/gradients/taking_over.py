"""What DeepSpeed holds of a gradient when it is taken over: whether it is as known here, and which values are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..stage3 import GradientState, SwappedState
from .master_gradient import MasterGradient

#: How many elements are compared at a time.
_COMPARED_ELEMENTS = 2**22


def can_take(
    state: GradientState, sub_group_id: int, accumulated: Tensor, base: int, on_host: Callable[[Tensor], bool]
) -> bool:
    """Whether the fp32 gradient of a sub-group is the cast of a part of ``accumulated``, which begins at ``base``.

    It is where it and its master are fp32, on the host or in files, and its parameters lie one after the other.
    """
    parameters = state.parameters(sub_group_id)
    numel = sum(each.numel for each in parameters)
    master = state.stage3.master(sub_group_id)
    if state.stage3.is_swapped(sub_group_id):
        is_known = SwappedState(state.stage3, sub_group_id).is_known
    else:
        is_known = on_host(master) and _is_plain(master.grad, numel) and on_host(master.grad)
    return (
        is_known
        and master.dtype == torch.float32
        and on_host(accumulated)
        and all(
            state.view(each.key).data_ptr() == accumulated.narrow(0, base + each.offset, each.numel).data_ptr()
            for each in parameters
            if each.numel
        )
    )


def _is_plain(gradient: Any, numel: int) -> bool:
    return (
        type(gradient) is Tensor
        and gradient.dtype == torch.float32
        and gradient.shape == (numel,)
        and gradient.is_contiguous()
    )


def keep_what_differs(taken: MasterGradient, before: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Keeps the values of each parameter that are not the cast of what was accumulated. Blocks.

    Args:
        taken: Makes the cast.
        before: The gradient as DeepSpeed has it, flat, fp32, on the host.
        ranges: Begins and ends of what is defined there, in elements.
    """
    for piece in taken.pieces:
        _, offset, numel = piece.parameter
        for begin, stop in _chunks(offset, offset + numel, ranges):
            here = taken.read(begin, stop - begin).view(torch.int32)
            there = before.narrow(0, begin, stop - begin).view(torch.int32)
            piece.is_zero = piece.is_zero and not there.any()
            if not torch.equal(here, there):
                piece.own = before.narrow(0, offset, numel).clone()
                break


def _chunks(begin: int, end: int, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Chunks of the parts of one range that others cover."""
    shared = [(max(begin, first), min(end, last)) for first, last in ranges if first < end and begin < last]
    starts = [(at, last) for first, last in shared for at in range(first, last, _COMPARED_ELEMENTS)]
    return [(at, min(at + _COMPARED_ELEMENTS, last)) for at, last in starts]
