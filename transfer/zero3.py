"""DeepSpeed ZeRO-3 on top of the interface: the copy-back of offloaded master partitions.

``attach(engine)`` serves one engine, ``install()`` every engine that the process makes, also through
Accelerate, the HF Trainer or Lightning. Both are idempotent and undone by ``detach`` and ``uninstall``.

What is replaced is one copy in ``_reassign_or_swap_out_partitioned_parameters``: after the optimizer's
step, each sub-group's fp32 master partition on the host goes to its low-precision partition on the
device. That method has had the same name and body from DeepSpeed 0.16 to 0.19; SuperOffload overrides
it, so it is replaced in the class that defines it. Where the copy does not cross from the host to
the device, DeepSpeed's own code runs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .config import TransferConfig
from .config_file import ConfigLike, resolve_config
from .errors import AttachError
from .interface import HostToDeviceTransfer
from .routed import build_transfer
from .zero3_config import config_for_engine

_COPY_BACK = "_reassign_or_swap_out_partitioned_parameters"
_NEEDED = (
    _COPY_BACK,
    "fp16_partitioned_groups_flat",
    "fp32_partitioned_groups_flat",
    "_unflatten_partitioned_parameters",
)


@dataclass(frozen=True)
class _Attachment:
    transfer: HostToDeviceTransfer
    config: TransferConfig | None = None  # of a transfer that was made here, and is closed on detach
    by_install: bool = False


@dataclass(frozen=True)
class _Installed:
    config: ConfigLike | None


_lock = threading.RLock()
_attachments: weakref.WeakKeyDictionary[Any, _Attachment] = weakref.WeakKeyDictionary()
_detached: weakref.WeakSet[Any] = weakref.WeakSet()  # on purpose, although install is in force
_installed: _Installed | None = None
_hooks: dict[tuple[type, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}  # (original, ours)


def attach(engine: Any, transfer: HostToDeviceTransfer | ConfigLike | None = None) -> HostToDeviceTransfer:
    """Lets every copy-back of one ZeRO-3 engine go through ``transfer``.

    Attaching again with the same transfer changes nothing; with another one replaces it. When the
    engine is destroyed, the transfer is closed, so that nothing stays pinned.

    Args:
        engine: A DeepSpeed engine, its ZeRO-3 optimizer, or a framework's wrapper of either.
        transfer: A ``HostToDeviceTransfer``, which stays the caller's; or a configuration as
            for ``build_transfer``; or None: the file in ``$H2D_CONFIG``, else the section
            ``host_to_device_transfer`` of the engine's DeepSpeed config, else the defaults.

    Returns:
        The transfer in use.

    Raises:
        AttachError: The engine does not run ZeRO-3.
        ConfigError: The configuration has mistakes. The engine is unchanged in both cases.
    """
    optimizer = _zero3_optimizer(engine)
    if isinstance(transfer, HostToDeviceTransfer):
        return _attach(optimizer, _Attachment(transfer))
    config = config_for_engine(transfer, _deepspeed_config(engine))
    with _lock:
        current = _attachments.get(optimizer)
        if current is not None and current.config == config:
            _attachments[optimizer] = replace(current, by_install=False)
            return current.transfer
    return _attach(optimizer, _Attachment(build_transfer(config), config))


def detach(engine: Any) -> None:
    """Gives an engine DeepSpeed's own copy back. An engine that is not attached is fine.

    A transfer that ``attach`` or ``install`` built is closed; one that the caller gave is not.
    """
    optimizer = _zero3_optimizer(engine)
    with _lock:
        if _installed is not None:
            _detached.add(optimizer)
        attachment = _attachments.pop(optimizer, None)
        if attachment is not None and attachment.config is not None:
            attachment.transfer.close()
        _unhook_if_unused()


def install(config: ConfigLike | None = None) -> None:
    """Attaches every ZeRO-3 engine of this process.

    Engines made from now on are attached when they are made, older ones at their next copy-back.
    Installing again replaces the configuration for engines to come.

    Args:
        config: As for ``build_transfer``. None: for each engine ``$H2D_CONFIG``, else its
            DeepSpeed config, else the defaults. The DeepSpeed config of an engine made before
            ``install`` cannot be seen: use ``attach`` for it.

    Raises:
        ConfigError: The configuration has mistakes. Nothing is installed then.
    """
    global _installed
    if config is not None:
        config = resolve_config(config)
    from deepspeed.runtime.engine import DeepSpeedEngine

    with _lock:
        _installed = _Installed(config)
        _hook(DeepSpeedEngine, "_configure_zero_optimizer", _configure_zero_optimizer)
        for optimizer_class in _zero3_classes():
            _hook_optimizer_class(optimizer_class)


def uninstall() -> None:
    """Undoes ``install``: the engines it attached get DeepSpeed's own copy back. Twice is fine.

    Engines that ``attach`` was called for stay attached.
    """
    global _installed
    with _lock:
        _installed = None
        for optimizer, attachment in list(_attachments.items()):
            if attachment.by_install:
                del _attachments[optimizer]
                attachment.transfer.close()
        _detached.clear()
        _unhook_if_unused()


def _attach(optimizer: Any, attachment: _Attachment) -> HostToDeviceTransfer:
    for sub_group_id in range(len(optimizer.fp32_partitioned_groups_flat)):
        if _crosses(optimizer, sub_group_id, attachment.transfer):
            attachment.transfer.prepare(optimizer.fp32_partitioned_groups_flat[sub_group_id].data)
    with _lock:
        current = _attachments.get(optimizer)
        _hook_optimizer_class(type(optimizer))
        _attachments[optimizer] = attachment
        _detached.discard(optimizer)
        if current is not None and current.config is not None and current.transfer is not attachment.transfer:
            current.transfer.close()
    return attachment.transfer


def _crosses(optimizer: Any, sub_group_id: int, transfer: HostToDeviceTransfer) -> bool:
    """Whether this sub-group's copy-back is one that the interface is for."""
    destination = optimizer.fp16_partitioned_groups_flat[sub_group_id]
    source = optimizer.fp32_partitioned_groups_flat[sub_group_id]
    if destination is None or getattr(optimizer, "offload_param", False):  # on NVMe, or on the host
        return False
    if destination.numel() and destination.data_ptr() == source.data_ptr():  # autocast: one and the same
        return False
    return transfer.is_host_to_device(destination.data, source.data)


def _copy_back(original: Callable[..., Any], optimizer: Any, sub_group_id: int) -> Any:
    attachment = _attachments.get(optimizer) or _attach_late(optimizer)
    if attachment is None or not _crosses(optimizer, sub_group_id, attachment.transfer):
        return original(optimizer, sub_group_id)
    destination = optimizer.fp16_partitioned_groups_flat[sub_group_id].data
    # The next forward's all-gathers run on a stream that does not wait for this one: hence the wait in copy.
    attachment.transfer.copy(destination, optimizer.fp32_partitioned_groups_flat[sub_group_id].data)
    optimizer._unflatten_partitioned_parameters(sub_group_id)
    return None


def _attach_late(optimizer: Any) -> _Attachment | None:
    """Attaches an engine that is older than ``install``."""
    if _installed is None or optimizer in _detached:
        return None
    config = config_for_engine(_installed.config, {})
    _attach(optimizer, _Attachment(build_transfer(config), config, by_install=True))
    return _attachments[optimizer]


def _destroy(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    attachment = _attachments.pop(optimizer, None)
    if _installed is not None:
        _detached.add(optimizer)
    try:
        if attachment is not None:
            # Before DeepSpeed frees the partitions that copies in flight use.
            attachment.transfer.close()
    finally:
        original(optimizer, *args, **kwargs)
        with _lock:
            _unhook_if_unused()


def _configure_zero_optimizer(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    if _installed is None:
        return original(engine, *args, **kwargs)
    # Before the optimizer is built: a mistake in the configuration should not cost that wait.
    config = config_for_engine(_installed.config, _deepspeed_config(engine))
    optimizer = original(engine, *args, **kwargs)
    if all(hasattr(optimizer, name) for name in _NEEDED):
        _attach(optimizer, _Attachment(build_transfer(config), config, by_install=True))
    return optimizer


def _zero3_optimizer(engine: Any) -> Any:
    candidate = engine
    for _ in range(4):  # framework wrapper -> engine -> optimizer wrapper -> optimizer
        if all(hasattr(candidate, name) for name in _NEEDED):
            if _COPY_BACK in vars(candidate):
                raise AttachError(f"{_COPY_BACK} of this engine's optimizer has been replaced by somebody else already")
            return candidate
        candidate = getattr(candidate, "optimizer", None)
    used = type(getattr(engine, "optimizer", engine)).__name__
    raise AttachError(
        f"{type(engine).__name__} does not run ZeRO-3 as DeepSpeed 0.16 to 0.19 has it (its optimizer is {used}): "
        "set `zero_optimization.stage` to 3, and attach after deepspeed.initialize"
    )


def _deepspeed_config(engine: Any) -> Mapping[str, Any]:
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    return config if isinstance(config, Mapping) else {}


def _zero3_classes() -> list[type]:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    classes: list[type] = [DeepSpeedZeroOptimizer_Stage3]
    try:
        from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
    except ImportError:  # before 0.18
        return classes
    return [*classes, SuperOffloadOptimizer_Stage3]


def _hook_optimizer_class(optimizer_class: type) -> None:
    for name, ours in ((_COPY_BACK, _copy_back), ("destroy", _destroy)):
        for owner in optimizer_class.__mro__:
            if name in vars(owner):
                _hook(owner, name, ours)
                break


def _hook(owner: type, name: str, ours: Callable[..., Any]) -> None:
    """Replaces a method by ``ours``, which gets the original first. Once for each method."""
    if (owner, name) in _hooks:
        return
    original = vars(owner)[name]

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(original, self, *args, **kwargs)

    setattr(owner, name, hooked)
    _hooks[(owner, name)] = (original, hooked)


def _unhook_if_unused() -> None:
    if _installed is not None or len(_attachments):
        return
    for (owner, name), (original, hooked) in list(_hooks.items()):
        # Where somebody else has wrapped our wrapper since, it stays, and passes every call on.
        if vars(owner)[name] is hooked:
            setattr(owner, name, original)
            del _hooks[(owner, name)]
