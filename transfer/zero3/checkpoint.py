"""Masters on NVMe after a checkpoint was loaded: their files go straight to the low-precision partitions.

``engine.load_checkpoint`` copies the swap files back and calls ``reset_swap_buffers``. DeepSpeed's reads the
whole state of each sub-group (master, both moments, gradients) and writes it out again, for the one copy of
the master. What else it leaves behind is done here too: gradients kept in memory are gone, and ``grad`` is None.

That holds while no swap buffer is in use. One is, where gradients or a sub-group are on their way to or from
the disk: then, as where anything is not as known of DeepSpeed 0.16 to 0.19, DeepSpeed's own code runs, and for
every sub-group, as its pipelined swapper reads ahead of the one that it is asked for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import NotATensorError, StrategyUnavailableError
from ..nvme import SwappedTensor
from .attachment import Attachment, crosses, has_own_order
from .patching import Replacement
from .swap_buffers import buffer_manager, is_swapped

logger = logging.getLogger("transfer")


def replacements(find: Callable[[Any], Attachment | None]) -> dict[str, Replacement]:
    """The method to replace, by name.

    Args:
        find: Gives the attachment of an optimizer, or None.
    """

    def reset_swap_buffers(original: Callable[..., Any], optimizer: Any) -> Any:
        attachment = find(optimizer)
        files = None if attachment is None else _files(optimizer, attachment)
        if attachment is None or not files:
            return original(optimizer)
        try:
            with _finishing(attachment):
                for sub_group_id in range(len(optimizer.fp16_groups)):
                    if sub_group_id in files:
                        destination = optimizer.fp16_partitioned_groups_flat[sub_group_id].data
                        attachment.submit(sub_group_id, destination, files[sub_group_id])
                    else:
                        optimizer._prepare_sub_group(sub_group_id, set())
                        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group_id)
                        optimizer._release_sub_group(sub_group_id, set())
        except (NotATensorError, StrategyUnavailableError) as error:
            if not attachment.transfer.fallback:
                raise
            logger.warning("masters on NVMe are restored by DeepSpeed's own code: %s", error)
            return original(optimizer)
        for sub_group_id in files:
            optimizer._unflatten_partitioned_parameters(sub_group_id)
            _swap_info(optimizer, sub_group_id).release_unswapped_gradients()
            optimizer.fp32_partitioned_groups_flat[sub_group_id].grad = None
        return None

    return {"reset_swap_buffers": reset_swap_buffers}


@contextlib.contextmanager
def _finishing(attachment: Attachment) -> Iterator[None]:
    """Waits for every copy that was submitted in the block, also after an error, which is the one to see."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            attachment.finish()
        raise
    attachment.finish()


def _files(optimizer: Any, attachment: Attachment) -> dict[int, SwappedTensor] | None:
    """The master's file of each sub-group that is swapped; None where one cannot be read like this."""
    if has_own_order(optimizer) or getattr(buffer_manager(optimizer), "used_buffer_index", True):
        return None
    files: dict[int, SwappedTensor] = {}
    for sub_group_id in range(len(optimizer.fp16_groups)):
        if is_swapped(optimizer, sub_group_id):
            file = _file(optimizer, sub_group_id, attachment)
            if file is None:
                return None
            files[sub_group_id] = file
    return files


def _file(optimizer: Any, sub_group_id: int, attachment: Attachment) -> SwappedTensor | None:
    """A handle to the master's values on disk, or None."""
    info = _swap_info(optimizer, sub_group_id)
    path = _path(info)
    if path is None or not hasattr(info, "release_unswapped_gradients") or not Path(path).is_file():
        return None
    if not crosses(optimizer, sub_group_id, attachment.transfer):
        return None
    shape = optimizer.fp16_partitioned_groups_flat[sub_group_id].shape
    if tuple(shape) != (info.numel(),):
        return None
    return SwappedTensor.from_file(path, info.dtype(), tuple(shape))  # padded, to whole disk blocks


def _swap_info(optimizer: Any, sub_group_id: int) -> Any:
    infos = getattr(optimizer.optimizer_swapper, "swap_params_info", {})
    return infos.get(getattr(optimizer.fp32_partitioned_groups_flat[sub_group_id], "ds_id", None))


def _path(info: Any) -> str | None:
    """Where the master lies; the moments come after it."""
    tensors, paths = getattr(info, "tensors", None), getattr(info, "swap_paths", None)  # 0.16 has the latter
    if tensors and hasattr(tensors[0], "swap_path"):
        return str(tensors[0].swap_path)
    return str(paths[0]) if paths else None
