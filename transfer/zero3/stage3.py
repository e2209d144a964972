"""Every private name of DeepSpeed that this package's ZeRO-3 part uses.

``Stage3`` is a view of one ZeRO-3 optimizer. To support another version of DeepSpeed, read what it does under these
names, and change this file, the adapter in ``accelerators`` and the range in ``pyproject.toml``. The names were read
in 0.16.0, 0.17.6, 0.18.9, 0.19.3, 0.19.6 and 0.19.8; ``NAMES`` says in which of these each exists.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

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

_ALL, _SINCE_0_17, _SINCE_0_18 = ("0.16.0", "0.19.8"), ("0.17.6", "0.19.8"), ("0.18.9", "0.19.8")
#: Each private name, with the first and the last version in which it was read.
NAMES = {
    # ZeRO-3's optimizer
    "DeepSpeedZeroOptimizer_Stage3": _ALL,
    UPDATE: _ALL,
    COPY_BACK: _ALL,  # the same body in all of them; SuperOffload has its own
    RELEASE: _ALL,
    POST_STEP: _ALL,
    RESET: _ALL,
    "_prepare_sub_group": _ALL,
    "_unflatten_partitioned_parameters": _ALL,
    "_swappable_optimizer_subgroup": _ALL,
    "fp16_partitioned_groups_flat": _ALL,
    "fp32_partitioned_groups_flat": _ALL,
    "swap_optimizer": _ALL,
    "zenflow": _SINCE_0_17,
    "SuperOffloadOptimizer_Stage3": _SINCE_0_18,
    "superoffload_cpu_optimizer": _SINCE_0_18,
    # Its swapper
    "optimizer_swapper": _ALL,
    "swap_buffer_manager": _ALL,
    "all_buffers": _ALL,
    "used_buffer_index": _ALL,
    "swap_params_info": _ALL,
    "swap_paths": ("0.16.0", "0.16.0"),  # the master's is the first
    "swap_path": _SINCE_0_17,  # of each of an info's ``tensors``
    "release_unswapped_gradients": _ALL,
    "ds_id": _ALL,
    # CPU Adam
    "DeepSpeedCPUAdam": _ALL,
    "ds_opt_adam": _ALL,
    "adam_update": _ALL,
    # The engine
    "DeepSpeedEngine": _ALL,
    CONFIGURE: _ALL,
    "_param_dict": _ALL,
}

#: From this version on, a CPU Adam update with the step number of the one before leaves the op's state alone; before
#: it, each update moves the state on (``csrc/includes/cpu_adam.h``, IncrementStep).
_PARTS_SINCE = Version("0.19.3")

#: The module of CPU Adam, whose functions make up its ``step``.
CPU_ADAM_MODULE = "deepspeed.ops.adam.cpu_adam"


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

    def loop(self) -> list[Any]:
        """The functions that run from the first copy-back of a step to its end; None for one that is missing.

        The last is the CPU optimizer's step. Two lists are equal where the same code runs.
        """
        cls, own = type(self.optimizer), vars(self.optimizer)
        methods = [own.get(name, getattr(cls, name, None)) for name in (UPDATE, COPY_BACK, RELEASE, POST_STEP)]
        return [*methods, getattr(getattr(self.optimizer, "optimizer", None), STEP, None)]

    def master(self, sub_group_id: int) -> Any:
        """The fp32 master partition, flat; a placeholder while it is on NVMe."""
        return self.optimizer.fp32_partitioned_groups_flat[sub_group_id].data

    def partitions(self, sub_group_id: int) -> tuple[Any, Any] | None:
        """The low-precision and the master partition, both flat.

        Returns:
            None where the copy-back is not a copy from one to the other on the device: the low-precision partition is
            offloaded (``offload_states``, ``offload_param``), or is the master itself (autocast).
        """
        optimizer = self.optimizer
        flat = optimizer.fp16_partitioned_groups_flat
        if sub_group_id >= len(flat) or flat[sub_group_id] is None or getattr(optimizer, "offload_param", False):
            return None
        destination, master = flat[sub_group_id].data, optimizer.fp32_partitioned_groups_flat[sub_group_id].data
        if destination.numel() and destination.data_ptr() == master.data_ptr():
            return None
        return destination, master

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


def find_optimizer(engine: Any) -> Any:
    """The ZeRO-3 optimizer in an engine, a wrapper of one, or itself; None where there is none."""
    return next(filter(is_zero3, _unwrapped(engine)), None)


def _unwrapped(engine: Any) -> Iterator[Any]:
    for _ in range(4):  # framework wrapper -> engine -> optimizer wrapper -> optimizer
        yield engine
        engine = getattr(engine, "optimizer", None)


def is_zero3(optimizer: Any) -> bool:
    """Whether this is a ZeRO-3 optimizer as it is known here."""
    flat = ("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat")
    return all(hasattr(optimizer, name) for name in (COPY_BACK, *flat, "_unflatten_partitioned_parameters"))


def find_engine(engine: Any) -> weakref.ref[Any] | None:
    """The DeepSpeed engine in a framework's wrapper, or itself: what has a monitor."""
    for candidate in _unwrapped(engine):
        if hasattr(candidate, "monitor") and hasattr(candidate, "global_samples"):
            with contextlib.suppress(TypeError):  # it takes no weak references
                return weakref.ref(candidate)
    return None


def deepspeed_config(engine: Any) -> Mapping[str, Any]:
    """The DeepSpeed config that an engine was made with; empty where it is not known."""
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    return config if isinstance(config, Mapping) else {}


def deepspeed_version() -> Version:
    """The version of DeepSpeed; 0 for one that is no version."""
    import deepspeed

    try:
        return Version(deepspeed.__version__)
    except InvalidVersion:
        return Version("0")


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
