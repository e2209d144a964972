"""Masters on NVMe after a checkpoint was loaded: their files go straight to the low-precision partitions.

``engine.load_checkpoint`` copies the swap files back and resets the swap buffers. DeepSpeed reads the whole state of
each sub-group for that (master, both moments, gradients) and writes it out again, for the one copy of the master. What
else it leaves behind is done here too: gradients kept in memory are gone, and ``grad`` is None.

DeepSpeed's own code runs instead, for every sub-group, while a swap buffer is in use (gradients or a sub-group are on
their way to or from the disk), and where anything differs from DeepSpeed 0.16 to 0.19. For every sub-group, because
its pipelined swapper reads ahead of the one that it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import NotATensorError, StrategyUnavailableError
from ..nvme import SwappedTensor
from . import stage3
from .attachment import Attachment
from .attachments import attachments
from .patching import Patch
from .stage3 import Stage3

logger = logging.getLogger("transfer")


def reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any) -> Any:
        attachment, view = attachments.find(optimizer), Stage3(optimizer)
        if attachment is not None and attachment.states.forget():
            # DeepSpeed restores no counts of steps: after a step that ended in its middle, they would differ for good.
            stage3.level_steps(view.cpu_optimizer)
        masters = None if attachment is None else _masters(view, attachment)
        if attachment is None or not masters:
            return original(optimizer)
        try:
            with attachment.finishing():
                for sub_group_id in view.sub_groups:
                    if sub_group_id in masters:
                        attachment.submit(sub_group_id, *masters[sub_group_id])
                    else:
                        view.reload(sub_group_id)
        except (NotATensorError, StrategyUnavailableError) as error:
            if not attachment.transfer.fallback:
                raise
            logger.warning("masters on NVMe are restored by DeepSpeed's own code: %s", error)
            return original(optimizer)
        for sub_group_id in masters:
            view.unflatten(sub_group_id)
            view.forget_gradients(sub_group_id)
            if attachment.gradients is not None:
                attachment.gradients.show(sub_group_id)
        return None

    return patched


def state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is saved is whole: state that could not be written is written now, or an error."""

    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = attachments.get(optimizer)
        if attachment is not None:
            attachment.states.flush()
        return original(optimizer, *args, **kwargs)

    return patched


def swap_in(original: Callable[..., Any]) -> Callable[..., Any]:
    """What DeepSpeed reads is whole, in its own step or for ``safe_get_*``; what it writes of files is read anew.

    As ``state_dict``, and so are the gradients that are in memory.
    """

    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = attachments.get(optimizer)
        if attachment is not None and not (attachment.plan is not None and attachment.plan.passes):
            attachment.states.let_go()
            if attachment.gradients is not None:
                attachment.gradients.show_all()
        return original(optimizer, *args, **kwargs)

    return patched


PATCHES: dict[str, Patch] = {stage3.RESET: reset, stage3.STATE_DICT: state_dict, stage3.SWAP_IN: swap_in}


def _masters(view: Stage3, attachment: Attachment) -> dict[int, tuple[Any, SwappedTensor]] | None:
    """The low-precision partition and the master's file of each swapped sub-group; None if one has no such pair."""
    if view.overrides_step or view.uses_buffers:
        return None
    masters: dict[int, tuple[Any, SwappedTensor]] = {}
    for sub_group_id in view.sub_groups:
        if view.is_swapped(sub_group_id):
            master = _master(view, sub_group_id, attachment)
            if master is None:
                return None
            masters[sub_group_id] = master
    return masters


def _master(view: Stage3, sub_group_id: int, attachment: Attachment) -> tuple[Any, SwappedTensor] | None:
    file = view.swap_file(sub_group_id)
    pair = attachment.partitions(view, sub_group_id)
    if file is None or pair is None or not Path(file.path).is_file() or tuple(pair[0].shape) != (file.numel,):
        return None
    return pair[0], SwappedTensor.from_file(file.path, file.dtype, (file.numel,))
