"""Every private name of DeepSpeed that this package's ZeRO-3 part uses.

``Stage3`` is a view of one ZeRO-3 optimizer. To support another version of DeepSpeed, read what it does under these
names, and change this file, the adapter in ``accelerators`` and the range in ``pyproject.toml``. The names were read
in 0.16.0, 0.17.6, 0.18.9, 0.19.3, 0.19.6 and 0.19.8; ``NAMES`` says in which of these each exists.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from accelerators.overlap import memory_problem

#: The methods that are replaced, in the order of a step.
STEP = "step"
UPDATE = "_optimizer_step"
COPY_BACK = "_reassign_or_swap_out_partitioned_parameters"
RELEASE = "_release_sub_group"
POST_STEP = "_post_step"
#: The others that are replaced: after a checkpoint was loaded, at the end, and of the engine when it is made.
RESET = "reset_swap_buffers"
DESTROY = "destroy"
CONFIGURE = "_configure_zero_optimizer"

#: The methods that a step's patches rely on: those that are replaced, and those that run in between.
_REPLACED = (STEP, UPDATE, COPY_BACK, RELEASE, POST_STEP)
SITES = (*_REPLACED, "_prepare_sub_group", "unscale_and_clip_grads")
_FLAT = ("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat")
#: The first and the last version whose step was read.
READ = (Version("0.16.0"), Version("0.19.8"))

_ALL, _SINCE_0_17, _SINCE_0_18 = ("0.16.0", "0.19.8"), ("0.17.6", "0.19.8"), ("0.18.9", "0.19.8")
#: Each private name, with the first and the last version in which it was read.
NAMES = {
    # ZeRO-3's optimizer; the copy-back has the same body in all of these, and SuperOffload has its own
    **dict.fromkeys(("DeepSpeedZeroOptimizer_Stage3", UPDATE, COPY_BACK, RELEASE, POST_STEP, RESET), _ALL),
    **dict.fromkeys(("_prepare_sub_group", "unscale_and_clip_grads", "_unflatten_partitioned_parameters"), _ALL),
    **dict.fromkeys(("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat"), _ALL),
    **dict.fromkeys(("swap_optimizer", "_swappable_optimizer_subgroup"), _ALL),
    "zenflow": _SINCE_0_17,
    **dict.fromkeys(("SuperOffloadOptimizer_Stage3", "superoffload_cpu_optimizer"), _SINCE_0_18),
    # Its swapper
    **dict.fromkeys(("optimizer_swapper", "swap_buffer_manager", "all_buffers", "used_buffer_index"), _ALL),
    **dict.fromkeys(("swap_params_info", "release_unswapped_gradients", "ds_id"), _ALL),
    "swap_paths": ("0.16.0", "0.16.0"),  # the master's is the first
    "swap_path": _SINCE_0_17,  # of each of an info's ``tensors``
    # CPU Adam
    **dict.fromkeys(("DeepSpeedCPUAdam", "ds_opt_adam", "adam_update"), _ALL),
    # The engine
    **dict.fromkeys(("DeepSpeedEngine", CONFIGURE, "_param_dict"), _ALL),
}

#: From this version on, a CPU Adam update with the step number of the one before leaves the op's state alone; before
#: it, each update moves the state on (``csrc/includes/cpu_adam.h``, IncrementStep).
_PARTS_SINCE = Version("0.19.3")


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
        return hasattr(self.optimizer, "superoffload_cpu_optimizer") or bool(getattr(self.optimizer, "zenflow", False))

    @property
    def keeps_masters_in_memory(self) -> bool:
        """Whether masters are offloaded to the host, and stay there between steps."""
        optimizer = self.optimizer
        return bool(getattr(optimizer, "offload_optimizer", False)) and not getattr(optimizer, "swap_optimizer", False)

    def updaters(self) -> list[Any]:
        """The optimizers that update masters: the host's, the device's, and Muon's own; None for one that is not."""
        muon = getattr(self.cpu_optimizer, "aux_optimizer", None)
        return [self.cpu_optimizer, getattr(self.optimizer, "backup_optimizer", None), muon]

    def helpers(self) -> list[Any]:
        """The other objects whose code runs in a step, and the optimizer itself."""
        names = ("timers", "loss_scaler", "optimizer_swapper", "torch_autocast_gradscaler")
        found = (getattr(self.optimizer, name, None) for name in names)
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
        optimizer = self.optimizer
        flat = optimizer.fp16_partitioned_groups_flat
        if sub_group_id >= len(flat) or flat[sub_group_id] is None or getattr(optimizer, "offload_param", False):
            return None
        destination, master = flat[sub_group_id].data, optimizer.fp32_partitioned_groups_flat[sub_group_id].data
        plain = memory_problem(destination) is None is memory_problem(master)
        is_master = plain and destination.numel() and destination.data_ptr() == master.data_ptr()
        return None if is_master or not plain else (destination, master)

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
    def uses_buffers(self) -> bool:
        """Whether a swap buffer is in use: a sub-group or gradients are on their way to or from the disk."""
        return bool(getattr(self.buffer_manager, "used_buffer_index", True))

    def swap_file(self, sub_group_id: int) -> SwapFile | None:
        """The file of a swapped master, or None where DeepSpeed's records are not as known here."""
        info = self._swap_info(sub_group_id)
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
        self._swap_info(sub_group_id).release_unswapped_gradients()
        self.optimizer.fp32_partitioned_groups_flat[sub_group_id].grad = None

    def reload(self, sub_group_id: int) -> None:
        """Reads one sub-group, copies it back and writes it, as DeepSpeed does after a checkpoint was loaded."""
        self.optimizer._prepare_sub_group(sub_group_id, set())
        getattr(self.optimizer, COPY_BACK)(sub_group_id)
        getattr(self.optimizer, RELEASE)(sub_group_id, set())

    def _swap_info(self, sub_group_id: int) -> Any:
        infos = getattr(self.optimizer.optimizer_swapper, "swap_params_info", {})
        return infos.get(getattr(self.optimizer.fp32_partitioned_groups_flat[sub_group_id], "ds_id", None))


def buffers_of(manager: Any) -> list[Any]:
    """The swap buffers of a manager, of which each sub-group uses a part."""
    return list(manager.all_buffers)


def optimizer_classes() -> list[type]:
    """DeepSpeed's classes that define a copy-back."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    classes: list[type] = [DeepSpeedZeroOptimizer_Stage3]
    with contextlib.suppress(ImportError):  # before 0.18
        from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

        classes.append(SuperOffloadOptimizer_Stage3)
    return classes


def engine_class() -> type:
    """DeepSpeed's engine, which makes the optimizer."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    return DeepSpeedEngine  # type: ignore[no-any-return]


def is_zero3(thing: Any) -> bool:
    """Whether this is a ZeRO-3 optimizer, also one that has ``moved`` something."""
    return hasattr(thing, COPY_BACK) or all(hasattr(thing, name) for name in _FLAT)


def deepspeed_config(engine: Any) -> Mapping[str, Any]:
    """The DeepSpeed config that an engine was made with; empty where it is not known."""
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    return config if isinstance(config, Mapping) else {}


def zero_config(engine: Any) -> Any:
    """The section ``zero_optimization`` as DeepSpeed has read and checked it, or None where it is not known."""
    return getattr(getattr(engine, "_config", None), "zero_config", None)


def deepspeed_version() -> Version:
    """The version of DeepSpeed; 0 for one that is no version."""
    import deepspeed

    return _version(deepspeed.__version__)


@functools.cache
def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def unread_version() -> str | None:
    """That the step of this version of DeepSpeed was not read, or None if it was."""
    version, (first, last) = deepspeed_version(), READ
    if first.release <= version.release <= last.release:
        return None
    return f"the step of DeepSpeed {version} was not read, those of {first} to {last} were"


def moved(thing: Any) -> tuple[list[str], bool]:
    """What the patches rely on and a ZeRO-3 optimizer, or a class of them, lacks; and whether copy-backs can be served.

    DeepSpeed's own classes need all of it. Others may have no step, and may wait in each copy-back.
    """
    cls = thing if isinstance(thing, type) else type(thing)
    needed: tuple[str, ...] = SITES if issubclass(cls, tuple(optimizer_classes())) else _REPLACED
    sites = [name for name in needed if not callable(getattr(thing, name, None))]
    attributes = ("_unflatten_partitioned_parameters", *(() if thing is cls else _FLAT))
    others = [name for name in (COPY_BACK, *attributes) if not hasattr(thing, name)]
    if len(sites) == len(needed) - 1 and not others:
        return [], True
    return list(dict.fromkeys(sites + others)), not others and (needed is not SITES or not sites)


def updates_in_parts(cpu_optimizer: Any) -> bool:
    """Whether this is DeepSpeed's CPU Adam, and its op may update a partition in parts."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    is_cpu_adam = type(cpu_optimizer) is DeepSpeedCPUAdam and hasattr(cpu_optimizer, "ds_opt_adam")
    return is_cpu_adam and deepspeed_version() >= _PARTS_SINCE


@contextlib.contextmanager
def replacing_op(cpu_optimizer: Any, update: Callable[..., Any]) -> Iterator[None]:
    """Within the block, ``update(original, *arguments)`` runs in place of each update by CPU Adam's op.

    The arguments are the op's: scalars, then parameters, gradients, first and second moments.
    """
    op = cpu_optimizer.ds_opt_adam
    try:
        cpu_optimizer.ds_opt_adam = _Op(op, update)
        yield
    finally:
        cpu_optimizer.ds_opt_adam = op


class _Op:
    """DeepSpeed's op with another update."""

    def __init__(self, op: Any, update: Callable[..., Any]) -> None:
        self._op, self._update = op, update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def adam_update(self, *arguments: Any) -> Any:
        return self._update(self._op.adam_update, *arguments)
