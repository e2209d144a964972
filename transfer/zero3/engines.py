"""DeepSpeed ZeRO-3 on top of the interface: the copy-back of offloaded master partitions.

``attach(engine)`` serves one engine, ``install()`` every engine that the process makes, also through
Accelerate, the HF Trainer or Lightning. Both are idempotent and undone by ``detach`` and ``uninstall``.

What is replaced is one copy in ``_reassign_or_swap_out_partitioned_parameters``: after the CPU
optimizer has updated a sub-group, its fp32 master partition on the host goes to its low-precision
partition on the device. That method has had the same name and body from DeepSpeed 0.16 to 0.19;
SuperOffload overrides it, so it is replaced in the class that defines it. Where the copy does not
cross from the host to the device, DeepSpeed's own code runs. Beside it, the method that copies masters
on NVMe after a checkpoint was loaded is replaced: ``zero3_restore`` says what for.

With ``completion: deferred`` the copies of a step are waited for at its end (``zero3_step`` says how).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config_file import ConfigLike, resolve_config
from ..errors import AttachError
from ..interface import HostToDeviceTransfer
from ..routing import build_transfer
from . import checkpoint as zero3_restore
from . import patching as hooks
from .attachment import Attachment, crosses
from .config import config_for_engine
from .step import COPY_BACK, replacements

logger = logging.getLogger("transfer")

_NEEDED = (
    COPY_BACK,
    "fp16_partitioned_groups_flat",
    "fp32_partitioned_groups_flat",
    "_unflatten_partitioned_parameters",
)


@dataclass(frozen=True)
class _Installed:
    config: ConfigLike | None


_lock = threading.RLock()
_attachments: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()
_detached: weakref.WeakSet[Any] = weakref.WeakSet()  # on purpose, although install is in force
_installed: _Installed | None = None


def attach(engine: Any, transfer: HostToDeviceTransfer | ConfigLike | None = None) -> HostToDeviceTransfer:
    """Lets every copy-back of one ZeRO-3 engine go through ``transfer``.

    Attaching again with the same transfer changes nothing; with another one replaces it. When the
    engine is destroyed, the transfer is closed, so that nothing stays pinned; it can be used again.
    Starts the accelerator, to see which copies cross.

    Args:
        engine: A DeepSpeed engine, its ZeRO-3 optimizer, or a framework's wrapper of either.
        transfer: A ``HostToDeviceTransfer``; or a configuration as for ``build_transfer``; or None:
            the file in ``$H2D_CONFIG``, else the section ``host_to_device_transfer`` of the engine's
            DeepSpeed config, else the defaults.

    Returns:
        The transfer in use.

    Raises:
        AttachError: The engine does not run ZeRO-3, or somebody else has replaced its copy-back.
        ConfigError: The configuration has mistakes.
        AcceleratorFailedError: The accelerator is unknown or not available here.
        Exception: What the strategy's ``prepare`` raises. The engine is unchanged in every case.
    """
    optimizer = _zero3_optimizer(engine)
    if optimizer is None:
        inner = getattr(engine, "optimizer", None)
        used = "" if inner is None else f" (its optimizer is {type(inner).__name__})"
        raise AttachError(
            f"{type(engine).__name__} is not a DeepSpeed 0.16 to 0.19 ZeRO-3 engine{used}: set "
            "`zero_optimization.stage` to 3, and attach after deepspeed.initialize"
        )
    if COPY_BACK in vars(optimizer):
        raise AttachError(f"{COPY_BACK} of this engine's optimizer has been replaced by somebody else already")
    if isinstance(transfer, HostToDeviceTransfer):
        wanted, config = transfer, None
    else:
        wanted, config = None, config_for_engine(transfer, _deepspeed_config(engine))
    with _lock:
        current = _attachments.get(optimizer)
        if current is not None and (current.transfer is wanted if wanted is not None else current.config == config):
            current.by_install = False
            hooks.hook_optimizer_class(type(optimizer), _OURS)
            return current.transfer
    chosen = wanted if wanted is not None else build_transfer(config)
    return _attach(optimizer, Attachment(chosen, config, engine=_deepspeed_engine(engine)))


def detach(engine: Any) -> None:
    """Restores DeepSpeed's own copy-back. Anything that is not attached is fine.

    A transfer that ``attach`` or ``install`` built is closed; one that the caller gave is not.

    Raises:
        Exception: What the transfer's ``close`` raises; the engine is detached all the same.
    """
    optimizer = _zero3_optimizer(engine)
    if optimizer is None:
        return
    with _lock:
        if _installed is not None:
            _detached.add(optimizer)
        attachment = _attachments.pop(optimizer, None)
        _unhook_if_unused()
    if attachment is not None:
        _give_up(attachment, optimizer)


def install(config: ConfigLike | None = None) -> None:
    """Attaches every ZeRO-3 engine of this process.

    Engines made from now on are attached when they are made, older ones at their next copy-back.
    Installing again replaces the configuration for engines to come.

    Args:
        config: As for ``build_transfer``. None: for each engine ``$H2D_CONFIG``, else its
            DeepSpeed config, else the defaults. The DeepSpeed config of an engine made before
            ``install`` cannot be seen: use ``attach`` for it.

    Raises:
        ConfigError: The configuration, or the file in ``$H2D_CONFIG``, has mistakes. Nothing is
            installed then. Mistakes in a DeepSpeed config are raised by ``deepspeed.initialize``,
            as is an accelerator that is not available; for older engines, by their next step.
    """
    global _installed
    checked = resolve_config(config)
    config = None if config is None else checked
    from deepspeed.runtime.engine import DeepSpeedEngine

    with _lock:
        _installed = _Installed(config)
        hooks.hook(DeepSpeedEngine, "_configure_zero_optimizer", _configure_zero_optimizer)
        for optimizer_class in hooks.zero3_classes():
            hooks.hook_optimizer_class(optimizer_class, _OURS)


def uninstall() -> None:
    """Undoes ``install``: the engines it attached get DeepSpeed's own copy back. Twice is fine.

    Engines that ``attach`` was called for stay attached.

    Raises:
        Exception: What closing a transfer raises; everything is uninstalled all the same.
    """
    global _installed
    with _lock:
        _installed = None
        by_install = [(optimizer, found) for optimizer, found in _attachments.items() if found.by_install]
        for optimizer, _ in by_install:
            del _attachments[optimizer]
        _detached.clear()
        _unhook_if_unused()
    with contextlib.ExitStack() as closing:  # closes every one of them, and raises the first error after
        for optimizer, attachment in by_install:
            closing.callback(_give_up, attachment, optimizer)


def _give_up(attachment: Attachment, optimizer: Any, *, close: bool = False) -> None:
    """Gives back what was prepared, and closes a transfer that was built here; with ``close`` a caller's, too."""
    with contextlib.ExitStack() as closing:  # each of these, from the last to the first, and an error after
        closing.callback(attachment.unprepare, optimizer)
        if close or attachment.config is not None:
            closing.callback(attachment.transfer.close)
        attachment.finish()


def _attach(optimizer: Any, attachment: Attachment) -> HostToDeviceTransfer:
    transfer = attachment.transfer
    sub_groups = range(len(optimizer.fp32_partitioned_groups_flat))
    try:
        crossing = [sub_group_id for sub_group_id in sub_groups if crosses(optimizer, sub_group_id, transfer)]
        for sub_group_id in crossing:
            attachment.prepare(optimizer, sub_group_id)
    except BaseException:
        _give_up(attachment, optimizer)
        raise
    # Masters on NVMe are nowhere in memory until a step swaps them in.
    in_memory = getattr(optimizer, "offload_optimizer", False) and not getattr(optimizer, "swap_optimizer", False)
    if in_memory and not crossing:
        logger.warning(
            "none of the %d sub-groups of this ZeRO-3 engine has its master partition on the host and its "
            "low-precision partition on the device: while that is so, DeepSpeed's own copy-back stays in use",
            len(sub_groups),
        )
    with _lock:
        current = _attachments.get(optimizer)
        hooks.hook_optimizer_class(type(optimizer), _OURS)
        _attachments[optimizer] = attachment
        _detached.discard(optimizer)
    if current is not None and current.transfer is not transfer:
        _give_up(current, optimizer)
    return transfer


def _find(optimizer: Any) -> Attachment | None:
    return _attachments.get(optimizer) or _attach_late(optimizer)


def _attach_late(optimizer: Any) -> Attachment | None:
    """Attaches an engine that is older than ``install``."""
    if _installed is None or optimizer in _detached:
        return None
    config = config_for_engine(_installed.config, {})
    _attach(optimizer, Attachment(build_transfer(config), config, by_install=True))
    return _attachments[optimizer]


def _destroy(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    attachment = _attachments.pop(optimizer, None)
    if _installed is not None:
        _detached.add(optimizer)
    try:
        if attachment is not None:
            # Before DeepSpeed frees the partitions that copies in flight use.
            _give_up(attachment, optimizer, close=True)
    finally:
        original(optimizer, *args, **kwargs)
        with _lock:
            _unhook_if_unused()


_OURS = {
    **replacements(_find),
    **zero3_restore.replacements(_find),
    "destroy": _destroy,
}


def _configure_zero_optimizer(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    if _installed is None:
        return original(engine, *args, **kwargs)
    # Before the optimizer is built: a mistake in the configuration should not cost that wait.
    config = config_for_engine(_installed.config, _deepspeed_config(engine))
    optimizer = original(engine, *args, **kwargs)
    if _is_zero3(optimizer):
        known = weakref.ref(engine)
        _attach(optimizer, Attachment(build_transfer(config), config, by_install=True, engine=known))
    return optimizer


def _is_zero3(candidate: Any) -> bool:
    return all(hasattr(candidate, name) for name in _NEEDED)


def _zero3_optimizer(engine: Any) -> Any:
    """The ZeRO-3 optimizer in an engine, a wrapper of one, or itself; None where there is none."""
    candidate = engine
    for _ in range(4):  # framework wrapper -> engine -> optimizer wrapper -> optimizer
        if _is_zero3(candidate):
            return candidate
        candidate = getattr(candidate, "optimizer", None)
    return None


def _deepspeed_engine(engine: Any) -> weakref.ref[Any] | None:
    """The DeepSpeed engine in a framework's wrapper, or itself: what has a monitor."""
    candidate = engine
    for _ in range(3):
        if hasattr(candidate, "monitor") and hasattr(candidate, "global_samples"):
            with contextlib.suppress(TypeError):  # a stand-in of some kind
                return weakref.ref(candidate)
        candidate = getattr(candidate, "optimizer", None)
    return None


def _deepspeed_config(engine: Any) -> Mapping[str, Any]:
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    return config if isinstance(config, Mapping) else {}


def _unhook_if_unused() -> None:
    if _installed is None and not _attachments:
        hooks.remove_all()
