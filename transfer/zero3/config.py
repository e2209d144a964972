"""ZeRO-3's configuration: argument > environment > DeepSpeed config > defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from accelerators.plugin_registry import nearest

from ..config import TransferConfig
from ..config_file import ConfigLike, resolve_config
from ..errors import ConfigError, ConfigProblem
from ..schema.environment import ENVIRONMENT_VARIABLE, environment_path
from ..schema.problems import format_value
from .stage3 import deepspeed_config, zero_config

#: Top-level key of a DeepSpeed config that holds our section, or the path of a YAML file with it.
SECTION = "host_to_device_transfer"

#: Keys that a user might write instead, and that DeepSpeed would ignore.
_SHORT_FORMS = ("h2d", "h2d_transfer", "host_to_device", "transfer")

logger = logging.getLogger("transfer")


def config_for_engine(argument: ConfigLike | None, engine: Any) -> TransferConfig:
    """The configuration for one engine.

    Args:
        argument: The caller's; wins over everything else.
        engine: What was made with the DeepSpeed config; None, or any other object, where that is not known.

    Raises:
        ConfigError: The configuration that applies has mistakes; or the DeepSpeed config has a key
            that looks like a misspelt ``host_to_device_transfer``, which DeepSpeed would ignore, or
            an offload ``ratio`` below 1 together with NVMe, which fails in the first step.
    """
    _refuse_partial_nvme(engine)
    given = deepspeed_config(engine)  # only our section: of its own, DeepSpeed has understood what it has understood
    if SECTION not in given:
        _refuse_misspelt_section(given)
    if argument is not None:
        return resolve_config(argument)
    section = given.get(SECTION)
    if environment_path():
        if section is not None:
            logger.warning("$%s overrides %s of the DeepSpeed config", ENVIRONMENT_VARIABLE, SECTION)
        return resolve_config(None)
    if section is None:
        return TransferConfig()
    if not isinstance(section, Mapping | str):
        message = f"found {format_value(section)}: expected a mapping, or the path of a YAML file"
        raise ConfigError([ConfigProblem(SECTION, message)])
    return resolve_config(section, origin=SECTION)


def _refuse_partial_nvme(engine: Any) -> None:
    """Goes by what DeepSpeed has made of its config: a number may stand in quotes there, or be left to a default."""
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    offload = getattr(zero_config(engine), "offload_optimizer", None)
    if offload is None:
        zero = deepspeed_config(engine).get("zero_optimization")
        section = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
        if not isinstance(section, Mapping):
            return
        try:
            offload = DeepSpeedZeroOffloadOptimizerConfig(**section)
        except ValueError:  # which DeepSpeed says itself
            return
    if offload.device == "nvme" and offload.ratio < 1:
        found = format_value(offload.ratio)
        message = f"found {found} with `device: nvme`; only `device: cpu` keeps a part on the device"
        raise ConfigError([ConfigProblem("zero_optimization.offload_optimizer.ratio", message)])


def _refuse_misspelt_section(deepspeed_config: Mapping[str, Any]) -> None:
    for key in deepspeed_config:
        if isinstance(key, str) and (key in _SHORT_FORMS or nearest(key, [SECTION], cutoff=0.8)):
            raise ConfigError([ConfigProblem(key, f"unknown key of the DeepSpeed config; did you mean {SECTION!r}?")])
