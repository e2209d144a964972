"""The patches of functions in whose middle copies are made by the transfer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .. import patching, stage3, summary
from ..attachment import Attachment
from ..attachments import attachments
from ..patching import Patch
from ..stage3 import Stage3
from .watching import WatchingCopies, WatchingMoves

logger = logging.getLogger("transfer")


def restore(original: Callable[..., Any]) -> Callable[..., Any]:
    """Masters in memory go to the low-precision partitions after a checkpoint was loaded.

    Engines that swap have sub-groups in memory only where they are small; the others are ``checkpoint``'s.
    """

    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment, view = attachments.get(optimizer), Stage3(optimizer)
        if attachment is None or view.swaps:
            return original(optimizer, *args, **kwargs)
        attachment.finish()  # what an interrupted step has left
        pairs = {each: pair for each in view.sub_groups if (pair := attachment.partitions(view, each)) is not None}

        def copy(sub_group_id: int, destination: Any, source: Any) -> None:
            attachment.prepare(view, sub_group_id, source)
            attachment.copy(sub_group_id, destination, source)

        with WatchingCopies(pairs, copy) as watching:
            result = original(optimizer, *args, **kwargs)
        _say(watching.missing, len(pairs), "after a checkpoint was loaded")
        return result

    return patched


def move(original: Callable[..., Any]) -> Callable[..., Any]:
    """State that is pageable memory of the host goes to the device."""

    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = attachments.get(optimizer)
        if attachment is None:
            return original(optimizer, *args, **kwargs)
        attachment.finish()
        with WatchingMoves(attachment.transfer):
            return original(optimizer, *args, **kwargs)

    return patched


def zenflow_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """What ZenFlow's process has updated goes to the low-precision partitions, where that overlaps.

    DeepSpeed returns without a copy where no update has ended; else it ends a step.
    """

    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment, view = attachments.find(optimizer), Stage3(optimizer)
        if attachment is None or view.swaps:
            return original(optimizer, *args, **kwargs)
        attachment.finish()
        pairs = _stale_partitions(view, attachment)
        ended = attachment.ended_steps

        def copy(sub_group_id: int, destination: Any, source: Any) -> None:
            attachment.prepare(view, sub_group_id, source)
            attachment.copy(sub_group_id, destination, source)
            summary.of(attachment).copy_back(view, sub_group_id, served=True)

        with WatchingCopies(pairs, copy) as watching:
            result = original(optimizer, *args, **kwargs)
        if attachment.ended_steps > ended:
            _say(watching.missing, len(pairs), "after an update by ZenFlow")
        return result

    return patched


PATCHES: dict[str, Patch] = {
    stage3.RESTORE: restore,
    stage3.RESTORE_UNIVERSAL: restore,
    stage3.RESTORE_PARAMETERS: move,
    stage3.RELOAD: move,
    stage3.MUON: move,
}


def patch_modules() -> None:
    """Replaces what is a function of a module. Idempotent."""
    module = stage3.zenflow_module()
    if hasattr(module, stage3.ZENFLOW_WAIT):
        patching.patch(module, stage3.ZENFLOW_WAIT, zenflow_wait)


def _stale_partitions(view: Stage3, attachment: Attachment) -> dict[int, tuple[Any, Any]]:
    found = {}
    for sub_group_id in view.sub_groups:
        pair, stale = view.partitions(sub_group_id), view.stale_master(sub_group_id)
        if pair is not None and stale is not None and attachment.transfer.is_host_to_device(pair[0], stale):
            found[sub_group_id] = (pair[0], stale)
    return found


def _say(missing: set[int], number: int, when: str) -> None:
    """Warns where DeepSpeed has copied in another way than was read."""
    if missing:
        version, read = stage3.deepspeed_version(), "{} to {}".format(*stage3.READ)
        logger.warning(
            "DeepSpeed %s copies %d of %d master partitions %s in another way than %s do: its own code has copied them",
            version,
            len(missing),
            number,
            when,
            read,
        )
