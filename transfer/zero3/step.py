"""What runs in place of ZeRO-3's methods, in the order of a step.

``step`` marks that a step is under way; ``_optimizer_step`` updates in tiles what no later update hides; the
copy-back submits; ``_release_sub_group`` waits for masters whose buffer DeepSpeed is about to reuse;
``_post_step``, which gathers parameters, waits for everything, as does the end of ``step`` however it is
reached. Whoever looks at a partition between steps sees a finished copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from . import monitor
from .attachment import Attachment, crosses, has_own_order
from .patching import Replacement, is_ours
from .swap_buffers import is_swapped
from .tiles import can_tile, has_post_hooks, updating_in_tiles

COPY_BACK = "_reassign_or_swap_out_partitioned_parameters"
#: What runs from the first copy-back of a step to its end.
_BETWEEN = ("_optimizer_step", COPY_BACK, "_release_sub_group", "_post_step")


def replacements(find: Callable[[Any], Attachment | None]) -> dict[str, Replacement]:
    """The methods to replace, by name.

    Args:
        find: Gives the attachment of an optimizer, or None.
    """

    def step(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = find(optimizer)
        if attachment is None or attachment.in_step:
            return original(optimizer, *args, **kwargs)
        attachment.finish()  # what an interrupted step may have left
        report = monitor.reporter(attachment)
        try:
            attachment.in_step, attachment.tiled = True, None
            result = original(optimizer, *args, **kwargs)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to see
                attachment.finish()
            raise
        else:
            attachment.finish()
        finally:
            attachment.in_step = False
        report()
        return result

    def optimizer_step(original: Callable[..., Any], optimizer: Any, sub_group_id: int, *args: Any) -> Any:
        attachment = find(optimizer)
        if attachment is None:
            return original(optimizer, sub_group_id, *args)
        attachment.release_source(sub_group_id)  # an update writes what a copy might still read
        cpu_optimizer = getattr(optimizer, "optimizer", None)
        if not (
            _defers(attachment, optimizer)
            and _is_exposed(optimizer, sub_group_id, attachment)
            and can_tile(cpu_optimizer)
        ):
            return original(optimizer, sub_group_id, *args)
        destination, master = _partitions(optimizer, sub_group_id)

        def submit(offset: int, length: int) -> None:
            if find(optimizer) is attachment:  # else another transfer was attached meanwhile, and copies all of it
                attachment.tiled = sub_group_id
                part = (offset, length)
                attachment.submit(sub_group_id, destination.narrow(0, *part), master.narrow(0, *part))

        attachment.prepare(optimizer, sub_group_id)
        with updating_in_tiles(cpu_optimizer, master, submit):
            return original(optimizer, sub_group_id, *args)

    def copy_back(original: Callable[..., Any], optimizer: Any, sub_group_id: int) -> Any:
        attachment = find(optimizer)
        if attachment is None or not crosses(optimizer, sub_group_id, attachment.transfer):
            return original(optimizer, sub_group_id)
        attachment.prepare(optimizer, sub_group_id)
        destination, master = _partitions(optimizer, sub_group_id)
        if not _defers(attachment, optimizer):
            # The next forward's all-gathers run on a stream that does not wait for this one: hence the wait in copy.
            attachment.transfer.copy(destination, master)
        elif attachment.tiled != sub_group_id:
            attachment.submit(sub_group_id, destination, master)
        attachment.tiled = None
        optimizer._unflatten_partitioned_parameters(sub_group_id)
        return None

    def release_sub_group(original: Callable[..., Any], optimizer: Any, sub_group_id: int, *args: Any) -> Any:
        attachment = find(optimizer)
        if attachment is not None and is_swapped(optimizer, sub_group_id):
            attachment.release_source(sub_group_id)
        return original(optimizer, sub_group_id, *args)

    def post_step(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = find(optimizer)
        if attachment is not None:
            attachment.finish()
        return original(optimizer, *args, **kwargs)

    return {
        "step": step,
        "_optimizer_step": optimizer_step,
        COPY_BACK: copy_back,
        "_release_sub_group": release_sub_group,
        "_post_step": post_step,
    }


def _defers(attachment: Attachment, optimizer: Any) -> bool:
    """Whether waits may be left to the end of the step.

    Not where somebody else's code runs between a copy-back and that end, and might look at the partitions:
    a subclass or a wrapper of these methods, or a hook of the optimizer.
    """
    if not (attachment.in_step and attachment.deferred) or has_own_order(optimizer):
        return False
    cls, own = type(optimizer), vars(optimizer)
    present = [name for name in _BETWEEN if hasattr(cls, name)]
    only_ours = all(is_ours(getattr(cls, name)) and name not in own for name in present)
    return only_ours and not has_post_hooks(getattr(optimizer, "optimizer", None))


def _is_exposed(optimizer: Any, sub_group_id: int, attachment: Attachment) -> bool:
    """Whether this sub-group's master crosses, and the updates that follow are too short to hide its copy.

    On NVMe no update follows before the master's buffer is wanted back. Elsewhere as many elements are
    enough: their update takes longer than the copy of these. The last sub-groups are often small ones.
    """
    if not crosses(optimizer, sub_group_id, attachment.transfer):
        return False
    if is_swapped(optimizer, sub_group_id):
        return True
    partitions = optimizer.fp16_partitioned_groups_flat
    left = partitions[sub_group_id].numel()
    for later in range(sub_group_id + 1, len(partitions)):
        if left <= 0:
            break
        if crosses(optimizer, later, attachment.transfer):
            left -= partitions[later].numel()
    return bool(left > 0)


def _partitions(optimizer: Any, sub_group_id: int) -> tuple[Any, Any]:
    """The low-precision and the master partition of a sub-group."""
    destination = optimizer.fp16_partitioned_groups_flat[sub_group_id].data
    return destination, optimizer.fp32_partitioned_groups_flat[sub_group_id].data
