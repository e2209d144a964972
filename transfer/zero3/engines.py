"""DeepSpeed ZeRO-3 on top of the interface: the copy-back of offloaded master partitions.

``attach(engine)`` serves one engine, ``install()`` every engine that the process makes, also through
Accelerate, the HF Trainer or Lightning. Both are idempotent and undone by ``detach`` and ``uninstall``.

The main copy is that of a step: after the CPU optimizer has updated a sub-group, its fp32 master partition on the host
goes to its low-precision partition on the device. DeepSpeed's method for it has had the same name and body from 0.16 to
0.19. SuperOffload overrides it, so it is replaced in each class that defines it. Where the copy is not one from host to
device, DeepSpeed's own code runs. ``step`` has the other patches of a step, which move the waits to its end;
``checkpoint`` and ``inside``, those for other copies; ``stage3``, DeepSpeed's private names and a list of all copies.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from ..config_file import ConfigLike, resolve_config
from ..errors import AttachError, run_all
from ..interface import HostToDeviceTransfer
from ..routing import build_transfer
from . import backward, checkpoint, finding, inside, patching, stage3, step, summary
from .attachment import Attachment
from .attachments import Installed, attachments
from .config import config_for_engine
from .patching import Patch
from .plan import why_wait
from .stage3 import Stage3

logger = logging.getLogger("transfer")

#: What follows where a part of DeepSpeed has moved.
_NOTHING = "nothing is replaced, and DeepSpeed's own code runs"


def attach(engine: Any, transfer: HostToDeviceTransfer | ConfigLike | None = None) -> HostToDeviceTransfer:
    """Makes every copy-back of one ZeRO-3 engine through ``transfer``.

    Attaching again with the same transfer changes nothing; another transfer replaces it. Destroying the engine
    closes the transfer, so that nothing stays pinned; it can be used again. Blocks while masters are prepared
    (page-locked). Starts the accelerator, to see which copies go from host to device.

    Page-locking changes what *your* copies from and to masters mean: with ``non_blocking=True`` they were over when
    they returned, and are not any more. Synchronize before you read or write such a master, or set
    ``pinned_direct.page_lock: false``.

    Copies run on behind the CPU optimizer only where all code up to the end of the step is DeepSpeed's, torch's or
    ours. Otherwise each copy-back waits, and the logger ``transfer`` says why, at level INFO. Where this version of
    DeepSpeed has moved what is replaced, a warning names it, and DeepSpeed's own code runs.

    Args:
        engine: A DeepSpeed engine, its ZeRO-3 optimizer, or a framework's wrapper of either (``.engine``, ``.module``,
            ``.optimizer``, ...).
        transfer: A ``HostToDeviceTransfer``; or a configuration as for ``build_transfer``; or None:
            the file in ``$H2D_CONFIG``, else the section ``host_to_device_transfer`` of the engine's
            DeepSpeed config, else the defaults.

    Returns:
        The transfer in use.

    Raises:
        AttachError: The engine does not run ZeRO-3, or other code has replaced the copy-back of its instance.
        ConfigError: The configuration has mistakes.
        AcceleratorFailedError: The accelerator is unknown or not available here.
        Exception: What the transfer's ``prepare`` raises. The engine is unchanged in every case.
    """
    optimizer = finding.find(engine, stage3.is_zero3)
    if optimizer is None:
        raise AttachError(_no_zero3(engine))
    if stage3.COPY_BACK in vars(optimizer):
        raise AttachError(f"{stage3.COPY_BACK} of this engine's optimizer has been replaced by other code already")
    if isinstance(transfer, HostToDeviceTransfer):
        wanted, config = transfer, None
    else:
        made_with = finding.find(engine, lambda each: bool(stage3.deepspeed_config(each)))
        config = config_for_engine(transfer, made_with)
        wanted = None
    if not _can_serve(optimizer):
        return wanted if wanted is not None else build_transfer(config)
    with attachments.lock:
        current = attachments.get(optimizer)
        if current is not None and (current.transfer is wanted if wanted is not None else current.config == config):
            current.by_install = False
            _patch(type(optimizer))
            return current.transfer
    chosen = wanted if wanted is not None else build_transfer(config)
    _add(optimizer, Attachment(chosen, config, engine=finding.weakly(finding.find(engine, finding.is_engine))))
    return chosen


def detach(engine: Any) -> None:
    """Restores DeepSpeed's own copy-back. Does nothing for what is not attached.

    Blocks until the engine's copies have ended. A transfer that ``attach`` or ``install`` built is closed; one that the
    caller gave is not.

    Raises:
        Exception: What the transfer's ``close`` raises; the engine is detached all the same.
    """
    optimizer = finding.find(engine, stage3.is_zero3)
    if optimizer is None:
        return
    attachment = attachments.remove(optimizer)
    _unpatch_if_idle()
    if attachment is not None:
        attachment.give_up()


def flush(engine: Any) -> None:
    """Writes optimizer state that stays in host memory (``transfer.zero3.host_memory``) to DeepSpeed's files.

    For code that reads those files itself. DeepSpeed's readers and ``save_checkpoint`` need no call. Does nothing where
    there is no such state. Blocks.

    Raises:
        SwapError: It cannot be written; it stays in memory, and is tried again by the next call or checkpoint.
        TransferError: Other code has written the files, or a step has ended in its middle: a checkpoint must be loaded.
    """
    optimizer = finding.find(engine, stage3.is_zero3)
    attachment = None if optimizer is None else attachments.get(optimizer)
    if attachment is not None:
        attachment.states.flush()


def install(config: ConfigLike | None = None) -> None:
    """Attaches every ZeRO-3 engine of this process.

    Engines made from now on are attached when they are made, older ones at their next step or copy-back.
    Installing again replaces the configuration for engines to come. Where this version of DeepSpeed has moved what is
    replaced, a warning names it, and nothing is installed.

    Args:
        config: As for ``build_transfer``. None: for each engine ``$H2D_CONFIG``, else its
            DeepSpeed config, else the defaults. The DeepSpeed config of an engine made before
            ``install`` cannot be seen: use ``attach`` for it.

    Raises:
        ConfigError: The configuration, or the file in ``$H2D_CONFIG``, has mistakes. Nothing is
            installed then. Mistakes in a DeepSpeed config are raised by ``deepspeed.initialize``,
            as is an accelerator that is not available; for older engines, by their next step.
    """
    checked = resolve_config(config)
    try:
        engine_class, optimizer_classes = stage3.engine_class(), stage3.optimizer_classes()
    except ImportError as error:
        _warn_of_moved([error.name or str(error)], _NOTHING)
        return
    if not all(map(_can_serve, optimizer_classes)):
        return
    if not hasattr(engine_class, stage3.CONFIGURE):
        _warn_of_moved([stage3.CONFIGURE], _NOTHING)
        return
    with attachments.lock:
        attachments.installed = Installed(None if config is None else checked)
        patching.patch(engine_class, stage3.CONFIGURE, _configure)
        for optimizer_class in optimizer_classes:
            _patch(optimizer_class)


def uninstall() -> None:
    """Undoes ``install``: the engines it attached get DeepSpeed's own copy back. Idempotent.

    Engines that ``attach`` was called for stay attached.

    Raises:
        Exception: What closing a transfer raises; everything is uninstalled all the same.
    """
    by_install = attachments.uninstall()
    _unpatch_if_idle()
    run_all([attachment.give_up for _, attachment in by_install])


def _configure(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attaches an engine's optimizer when it has been made."""

    def patched(engine: Any, *args: Any, **kwargs: Any) -> Any:
        installed = attachments.installed
        if installed is None:
            return original(engine, *args, **kwargs)
        # Before the optimizer is built: a mistake in the configuration should not cost that wait.
        config = config_for_engine(installed.config, engine)
        optimizer = original(engine, *args, **kwargs)
        if stage3.is_zero3(optimizer) and _can_serve(optimizer):
            _add(optimizer, Attachment(build_transfer(config), config, by_install=True, engine=weakref.ref(engine)))
        return optimizer

    return patched


def _destroy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Closes the transfer before DeepSpeed frees the partitions that copies in flight use."""

    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = attachments.remove(optimizer)
        try:
            if attachment is not None:
                attachment.give_up(close=True)
        finally:
            original(optimizer, *args, **kwargs)
            _unpatch_if_idle()

    return patched


_PATCHES: dict[str, Patch] = {
    **step.PATCHES,
    **backward.PATCHES,
    **checkpoint.PATCHES,
    **inside.PATCHES,
    stage3.DESTROY: _destroy,
}


def _add(optimizer: Any, attachment: Attachment) -> None:
    attachments.add(optimizer, attachment)
    try:
        _begin(optimizer, attachment)
    except BaseException:
        attachments.remove(optimizer)
        _unpatch_if_idle()
        attachment.give_up()
        raise


def _begin(optimizer: Any, attachment: Attachment) -> None:
    with attachments.lock:
        _patch(type(optimizer))
    if hasattr(optimizer, stage3.STEP):
        view = Stage3(optimizer)
        waits_because = why_wait(view, deferred=attachment.deferred)
        attachment.take_gradients(view, waits_because)
        attachment.say(waits_because)
    summary.attached(optimizer, attachment)


def _patch(optimizer_class: type) -> None:
    patching.patch_class(optimizer_class, stage3.optimizer_classes(), _PATCHES)
    inside.patch_modules()


def _no_zero3(engine: Any) -> str:
    """Why there is nothing to attach to."""
    inner = finding.find(engine, finding.is_engine)
    if inner is None:
        remedy = "pass what deepspeed.initialize returned; what wraps it here is not known"
    else:
        used = type(getattr(inner, "optimizer", None)).__name__
        remedy = f"its optimizer is {used}; set `zero_optimization.stage` to 3"
    return f"{type(engine).__name__} is not a DeepSpeed 0.16 to 0.19 ZeRO-3 engine, and holds none: {remedy}"


def _can_serve(thing: Any) -> bool:
    """Whether copy-backs of a ZeRO-3 optimizer, or a class of them, can be replaced; warns where anything has moved."""
    missing, can_serve = stage3.moved(thing)
    if missing:
        _warn_of_moved(missing, "each copy-back waits at once" if can_serve else _NOTHING)
    elsewhere = stage3.moved_inside(thing)
    if elsewhere:
        _warn_of_moved(elsewhere, "DeepSpeed's own code makes the copies of it")
    return can_serve


def _warn_of_moved(missing: list[str], consequence: str) -> None:
    names, version = ", ".join(f"`{name}`" for name in missing), stage3.deepspeed_version()
    read = "{} to {}".format(*stage3.READ)
    logger.warning("DeepSpeed %s has no %s where %s have it: %s", version, names, read, consequence)


def _unpatch_if_idle() -> None:
    with attachments.lock:
        if attachments.is_idle:
            patching.remove_all()
