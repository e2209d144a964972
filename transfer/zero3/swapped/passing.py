"""How the state of swapped sub-groups passes through one step, in place of DeepSpeed's swapping."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

from ...in_flight import InFlightCopy
from ..attachment import Attachment
from ..stage3 import Stage3, SwappedState


def passes(attachment: Attachment, stage3: Stage3, sub_group_id: int) -> bool:
    """Whether the state of a swapped sub-group passes through this step in tiles, and DeepSpeed does not swap it.

    Asked before each sub-group. At the first one that is swapped, reading begins, for all of them. One whose state
    passes has no memory then, but a size and a gradient.

    Raises:
        SwapError: See ``SwappedStates.begin``.
    """
    plan, gradients = attachment.plan, attachment.gradients
    if plan is None or gradients is None or sub_group_id not in plan.swapped:
        return False
    if plan.passes is None:
        destinations = {each: stage3.low_precision(each) for each in sorted(plan.swapped)}
        fit = all(_fit(gradients.of_step(each), destination) for each, destination in destinations.items())
        plan.passes = plan.in_tiles and fit and attachment.states.begin(stage3, destinations)
        if plan.passes:
            attachment.unprepare_swap_buffers()  # no copy of a step reads them
    gradient = gradients.of_step(sub_group_id)
    if not plan.passes or gradient is None:
        return False
    SwappedState(stage3, sub_group_id).stand_in(gradient.numel(), gradient)
    return True


def _fit(gradient: Any, destination: Any) -> bool:
    """Whether both are in memory, and equally long."""
    return gradient is not None is not destination and gradient.numel() == destination.numel()


def updating(attachment: Attachment, stage3: Stage3, sub_group_id: int) -> AbstractContextManager[None]:
    """A block in which the update of a sub-group that ``passes`` is made in tiles."""
    destination = stage3.low_precision(sub_group_id)

    def submit(offset: int, length: int, master: Any) -> InFlightCopy:
        return attachment.submit(sub_group_id, destination.narrow(0, offset, length), master, offset)

    make = functools.partial(attachment.states.tiles_of, sub_group_id, submit)
    return attachment.states.tiles.passing(stage3.cpu_optimizer, lambda *_: make())


def abandon(attachment: Attachment, stage3: Stage3) -> None:
    """After an error in a step: lets go of what passes, and writes what was updated, as far as that can be. Blocks."""
    with contextlib.suppress(Exception):
        attachment.states.settle()
    for sub_group_id in attachment.plan.swapped if attachment.plan is not None and attachment.plan.passes else ():
        SwappedState(stage3, sub_group_id).let_go()
