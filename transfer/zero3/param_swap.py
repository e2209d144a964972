"""Parameters on NVMe: what of a swapped sub-group is on the device all the same.

With ``offload_param: nvme``, a sub-group that has no flat buffer in host memory goes to disk parameter by
parameter. Some of its partitions are not on disk, though: persistent parameters (small ones, up to
``stage3_param_persistence_threshold``) have theirs on the device, and with ``aio.use_gds`` so has any that is
swapped in at that moment. DeepSpeed copies each of these from the host with a blocking copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .attachment import Attachment
from .patching import Replacement


def replacements(find: Callable[[Any], Attachment | None]) -> dict[str, Replacement]:
    """The method to replace, by name.

    Args:
        find: Gives the attachment of an optimizer, or None.
    """

    def swap_out(original: Callable[..., Any], optimizer: Any, sub_group_id: int) -> Any:
        attachment = find(optimizer)
        if attachment is None:
            return original(optimizer, sub_group_id)
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        transfer = attachment.transfer
        master = optimizer.fp32_partitioned_groups_flat[sub_group_id]
        present, on_disk, offset = [], [], 0
        for parameter, partition in zip(
            optimizer.fp16_groups[sub_group_id], optimizer.fp16_partitioned_groups[sub_group_id], strict=True
        ):
            source = master.narrow(0, offset, partition.ds_numel)
            offset += partition.ds_numel
            if partition.status == PartitionedParamStatus.AVAILABLE:
                present.append((partition.data, source.data))
            else:
                on_disk.append((parameter, source))
        crossing = [
            source.numel() for destination, source in present if transfer.is_host_to_device(destination, source)
        ]
        if not crossing:
            return original(optimizer, sub_group_id)
        attachment.prepare(optimizer, sub_group_id, max(crossing))
        # The same in DeepSpeed 0.16 to 0.19, but for who copies. Each is waited for: they are small.
        for destination, source in present:
            if transfer.is_host_to_device(destination, source):
                transfer.copy(destination, source)
            else:
                destination.copy_(source)
        if on_disk:
            parameters, sources = zip(*on_disk, strict=True)
            parameters[0].nvme_swapper.swap_out_partitioned_params(
                dst_fp16_params=list(parameters), src_fp32_params=list(sources)
            )
        return None

    return {"_partitioned_params_swap_out": swap_out}
