"""What runs in place of ZeRO-3's methods, in the order of a step.

``step`` marks that a step is under way; ``_optimizer_step`` updates the last sub-group in tiles; the
copy-back submits; ``_release_sub_group`` waits for masters whose buffer DeepSpeed is about to reuse;
``_post_step``, which gathers parameters, waits for everything, as does the end of ``step`` however it is
reached. Whoever looks at a partition between steps sees a finished copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from . import zero3_monitor as monitor
from .zero3_attachment import Attachment, crosses
from .zero3_hooks import Replacement
from .zero3_tiles import can_tile, updating_in_tiles

COPY_BACK = "_reassign_or_swap_out_partitioned_parameters"


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
        attachment.in_step, attachment.updates, attachment.tiled = True, 0, None
        engine = attachment.engine() if attachment.engine is not None else None
        before = attachment.transfer.stats() if monitor.enabled(engine) else None
        try:
            result = original(optimizer, *args, **kwargs)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to see
                attachment.finish()
            raise
        else:
            attachment.finish()
        finally:
            attachment.in_step = False
        if before is not None:
            monitor.write_step(engine, before, attachment.transfer.stats())
        return result

    def optimizer_step(original: Callable[..., Any], optimizer: Any, sub_group_id: int, *args: Any) -> Any:
        attachment = find(optimizer)
        if attachment is None or not _defers(attachment, optimizer):
            return original(optimizer, sub_group_id, *args)
        updates_before = attachment.updates
        devices = getattr(optimizer, "subgroup_to_device", {})
        attachment.updates += devices.get(sub_group_id, "cpu") == "cpu"
        cpu_optimizer = getattr(optimizer, "optimizer", None)
        if not (_is_last(optimizer, sub_group_id, attachment) and can_tile(cpu_optimizer, updates_before)):
            return original(optimizer, sub_group_id, *args)
        destination, master = _partitions(optimizer, sub_group_id)

        def submit(offset: int, length: int) -> None:
            attachment.tiled = sub_group_id
            attachment.submit(sub_group_id, destination.narrow(0, offset, length), master.narrow(0, offset, length))

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
        if attachment is not None and getattr(optimizer, "swap_optimizer", False):
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
    """Whether waits may be left to the end of the step. SuperOffload and ZenFlow have orders of their own."""
    has_own_order = hasattr(optimizer, "superoffload_cpu_optimizer") or getattr(optimizer, "zenflow", False)
    return attachment.in_step and attachment.deferred and not has_own_order


def _is_last(optimizer: Any, sub_group_id: int, attachment: Attachment) -> bool:
    """Whether this is the last sub-group whose master crosses."""
    later = range(len(optimizer.fp32_partitioned_groups_flat) - 1, sub_group_id, -1)
    return crosses(optimizer, sub_group_id, attachment.transfer) and not any(
        crosses(optimizer, each, attachment.transfer) for each in later
    )


def _partitions(optimizer: Any, sub_group_id: int) -> tuple[Any, Any]:
    """The low-precision and the master partition of a sub-group."""
    destination = optimizer.fp16_partitioned_groups_flat[sub_group_id].data
    return destination, optimizer.fp32_partitioned_groups_flat[sub_group_id].data
