"""Which DeepSpeed this is, and what of it has moved."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from .names import (
    COPY_BACK,
    FLAT,
    MUON,
    NAMES,
    READ,
    RELOAD,
    REPLACED,
    RESTORE,
    RESTORE_PARAMETERS,
    RESTORE_UNIVERSAL,
    SITES,
    SUPEROFFLOAD_READ,
    ZENFLOW_WAIT,
)

#: The methods in whose middle copies are made, which are replaced where there are.
_INSIDE = (RESTORE, RESTORE_UNIVERSAL, RESTORE_PARAMETERS, RELOAD, MUON)


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
    return hasattr(thing, COPY_BACK) or all(hasattr(thing, name) for name in FLAT)


def deepspeed_config(engine: Any) -> Mapping[str, Any]:
    """The DeepSpeed config that an engine was made with; empty where it is not known."""
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    return config if isinstance(config, Mapping) else {}


def zero_config(engine: Any) -> Any:
    """The section ``zero_optimization`` as DeepSpeed has read and checked it, or None where it is not known."""
    return getattr(getattr(engine, "_config", None), "zero_config", None)


def asks_for_zenflow(section: Mapping[str, Any]) -> bool:
    """Whether a section ``zero_optimization`` asks for ZenFlow."""
    return bool(section.get("zenflow"))


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


def zenflow_module() -> Any:
    """Where ZenFlow's part of ZeRO-3 is, which the module of ZeRO-3 imports; None before 0.18."""
    return sys.modules.get("deepspeed.runtime.zenflow.engine_stage3")


def unread_version(*, superoffload: bool = False) -> str | None:
    """That the step of this version of DeepSpeed, or SuperOffload's, was not read, or None if it was."""
    version, (first, last) = deepspeed_version(), SUPEROFFLOAD_READ if superoffload else READ
    if first.release <= version.release <= last.release:
        return None
    whose = "SuperOffload's step in" if superoffload else "the step of"
    return f"{whose} DeepSpeed {version} was not read, those of {first} to {last} were"


def moved_inside(thing: Any) -> list[str]:
    """The functions in whose middle DeepSpeed copied, and which this version does not have.

    Only DeepSpeed's own classes are asked. A version that is older than a function does not need it.
    """
    cls, version = thing if isinstance(thing, type) else type(thing), deepspeed_version()
    if not issubclass(cls, tuple(optimizer_classes())):
        return []
    zenflow = zenflow_module()
    owners = {**dict.fromkeys(_INSIDE, cls), **({ZENFLOW_WAIT: zenflow} if zenflow is not None else {})}
    since = {name: Version(NAMES[name][0]) for name in owners}
    return [name for name, owner in owners.items() if since[name] <= version and not hasattr(owner, name)]


def moved(thing: Any) -> tuple[list[str], bool]:
    """What the patches rely on and a ZeRO-3 optimizer, or a class of them, lacks; and whether copy-backs can be served.

    DeepSpeed's own classes need all of it. Others may have no step, and may wait in each copy-back.
    """
    cls = thing if isinstance(thing, type) else type(thing)
    needed: tuple[str, ...] = SITES if issubclass(cls, tuple(optimizer_classes())) else REPLACED
    sites = [name for name in needed if not callable(getattr(thing, name, None))]
    attributes = ("_unflatten_partitioned_parameters", *(() if thing is cls else FLAT))
    others = [name for name in (COPY_BACK, *attributes) if not hasattr(thing, name)]
    if len(sites) == len(needed) - 1 and not others:
        return [], True
    return list(dict.fromkeys(sites + others)), not others and (needed is not SITES or not sites)
