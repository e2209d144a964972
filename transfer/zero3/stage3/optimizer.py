"""A view of DeepSpeed's ZeRO-3 optimizer: its sub-groups, and what moves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerators.overlap import memory_problem

from .names import COPY_BACK, RELEASE


@dataclass(frozen=True)
class SwapFile:
    """A file of DeepSpeed's that begins with a master's values, padded to whole disk blocks."""

    path: str
    dtype: Any
    numel: int


@dataclass(frozen=True)
class Stage3:
    """A view of DeepSpeed's ZeRO-3 optimizer. It keeps no state: each answer is read from the optimizer."""

    optimizer: Any

    @property
    def sub_groups(self) -> range:
        """The numbers of this rank's sub-groups."""
        return range(len(self.optimizer.fp32_partitioned_groups_flat))

    @property
    def cpu_optimizer(self) -> Any:
        """What updates a master, or None."""
        return getattr(self.optimizer, "optimizer", None)

    @property
    def overrides_step(self) -> bool:
        """Whether the step is SuperOffload's or ZenFlow's, and not ZeRO-3's.

        They move masters into shared memory while the storage object stays, and order a step differently.
        """
        return self.is_superoffload or self.is_zenflow

    @property
    def is_superoffload(self) -> bool:
        """Whether another process updates the masters, one sub-group after the other, in memory shared with it."""
        return hasattr(self.optimizer, "superoffload_cpu_optimizer")

    @property
    def is_zenflow(self) -> bool:
        """Whether a part of the parameters is updated on the device, and the rest less often."""
        return bool(getattr(self.optimizer, "zenflow", False))

    def stale_master(self, sub_group_id: int) -> Any:
        """The master of ZenFlow's update before, which its process has left; None while there is none."""
        stale = getattr(self.master(sub_group_id), "stale_param", None)
        return None if stale is None else stale.data

    @property
    def keeps_masters_in_memory(self) -> bool:
        """Whether masters are offloaded to the host, and stay there between steps."""
        optimizer = self.optimizer
        return bool(getattr(optimizer, "offload_optimizer", False)) and not getattr(optimizer, "swap_optimizer", False)

    @property
    def swaps(self) -> bool:
        """Whether masters may be on NVMe between steps; small ones stay in memory."""
        return bool(getattr(self.optimizer, "swap_optimizer", False))

    def updaters(self) -> list[Any]:
        """The optimizers that update masters: the host's, the device's, and Muon's own; None for one that is not."""
        muon = getattr(self.cpu_optimizer, "aux_optimizer", None)
        return [self.cpu_optimizer, getattr(self.optimizer, "backup_optimizer", None), muon]

    def helpers(self) -> list[Any]:
        """The other objects whose code runs in a step, and the optimizer itself."""
        names = (
            "timers",
            "loss_scaler",
            "optimizer_swapper",
            "torch_autocast_gradscaler",
            "superoffload_cpu_optimizer",
        )
        found = (getattr(self.optimizer, name, None) for name in (*names, "superoffload_cpu_optimizer"))
        return [self.optimizer, *found, getattr(self.cpu_optimizer, "ds_opt_adam", None)]

    def master(self, sub_group_id: int) -> Any:
        """The fp32 master partition itself, flat; a placeholder while it is on NVMe."""
        return self.optimizer.fp32_partitioned_groups_flat[sub_group_id]

    def partitions(self, sub_group_id: int) -> tuple[Any, Any] | None:
        """The low-precision and the master partition, both flat.

        Returns:
            None where the copy-back is not a copy from one to the other on the device: the low-precision partition is
            offloaded (``offload_states``, ``offload_param``), is the master itself (autocast), or no plain memory.
        """
        return None if getattr(self.optimizer, "offload_param", False) else self.plain_partitions(sub_group_id)

    def plain_partitions(self, sub_group_id: int) -> tuple[Any, Any] | None:
        """The low-precision and the master partition, both flat, wherever they are.

        Returns:
            None where either is in a file, is no plain memory, or both are the same.
        """
        flat = self.optimizer.fp16_partitioned_groups_flat
        if sub_group_id >= len(flat) or flat[sub_group_id] is None:
            return None
        destination, master = flat[sub_group_id].data, self.optimizer.fp32_partitioned_groups_flat[sub_group_id].data
        plain = memory_problem(destination) is None is memory_problem(master)
        is_master = plain and destination.numel() and destination.data_ptr() == master.data_ptr()
        return None if is_master or not plain else (destination, master)

    def low_precision(self, sub_group_id: int) -> Any:
        """The low-precision partition, flat, or None where it is in a file."""
        partition = self.optimizer.fp16_partitioned_groups_flat[sub_group_id]
        return None if partition is None else partition.data

    def unflatten(self, sub_group_id: int) -> None:
        """Lets the parameters' partitions point into the flat low-precision partition."""
        self.optimizer._unflatten_partitioned_parameters(sub_group_id)

    def is_swapped(self, sub_group_id: int) -> bool:
        """Whether the state of this sub-group lives on NVMe; small ones stay in memory."""
        optimizer = self.optimizer
        return bool(
            getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(sub_group_id)
        )

    def swapped(self) -> set[int]:
        """The sub-groups for which ``is_swapped`` holds."""
        if not getattr(self.optimizer, "swap_optimizer", False):
            return set()
        return {sub_group_id for sub_group_id in self.sub_groups if self.is_swapped(sub_group_id)}

    @property
    def buffer_manager(self) -> Any:
        """The owner of the buffers that swapped sub-groups pass through, or None; see ``buffers_of``."""
        return getattr(getattr(self.optimizer, "optimizer_swapper", None), "swap_buffer_manager", None)

    @property
    def folder_of_files(self) -> Path | None:
        """Where the files of swapped sub-groups are; None where nothing is swapped."""
        folder = getattr(getattr(self.optimizer, "optimizer_swapper", None), "swap_folder", None)
        return Path(folder) if folder is not None else None

    @property
    def uses_buffers(self) -> bool:
        """Whether a swap buffer is in use: a sub-group or gradients are on their way to or from the disk."""
        return bool(getattr(self.buffer_manager, "used_buffer_index", True))

    def swap_file(self, sub_group_id: int) -> SwapFile | None:
        """The file of a swapped master, or None where DeepSpeed's records are not as known here."""
        info = self.swap_info(sub_group_id)
        tensors, paths = getattr(info, "tensors", None), getattr(info, "swap_paths", None)
        if tensors and hasattr(tensors[0], "swap_path"):
            path = str(tensors[0].swap_path)
        elif paths:
            path = str(paths[0])
        else:
            return None
        return SwapFile(path, info.dtype(), info.numel()) if hasattr(info, "release_unswapped_gradients") else None

    def forget_gradients(self, sub_group_id: int) -> None:
        """Drops the waiting gradients of a swapped sub-group, as swapping it out does."""
        self.swap_info(sub_group_id).release_unswapped_gradients()
        self.optimizer.fp32_partitioned_groups_flat[sub_group_id].grad = None

    def reload(self, sub_group_id: int) -> None:
        """Reads one sub-group, copies it back and writes it, as DeepSpeed does after a checkpoint was loaded."""
        self.optimizer._prepare_sub_group(sub_group_id, set())
        getattr(self.optimizer, COPY_BACK)(sub_group_id)
        getattr(self.optimizer, RELEASE)(sub_group_id, set())

    def swap_info(self, sub_group_id: int) -> Any:
        """DeepSpeed's record of a swapped sub-group, or None."""
        infos = getattr(self.optimizer.optimizer_swapper, "swap_params_info", {})
        return infos.get(getattr(self.optimizer.fp32_partitioned_groups_flat[sub_group_id], "ds_id", None))


def buffers_of(manager: Any) -> list[Any]:
    """The swap buffers of a manager, of which each sub-group uses a part."""
    return list(manager.all_buffers)
