"""ZeRO-3's configuration: argument > environment > DeepSpeed config > defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from accelerators.plugin_registry import nearest

from ..config import TransferConfig
from ..config_file import ENVIRONMENT_VARIABLE, ConfigLike, environment_path, resolve_config
from ..errors import ConfigError, ConfigProblem
from ..schema.problems import format_value

#: Top-level key of a DeepSpeed config that holds our section, or the path of a YAML file with it.
SECTION = "host_to_device_transfer"

#: Keys that a user might write instead, and that DeepSpeed would ignore.
_SHORT_FORMS = ("h2d", "h2d_transfer", "host_to_device", "transfer")

logger = logging.getLogger("transfer")


def config_for_engine(argument: ConfigLike | None, deepspeed_config: Mapping[str, Any]) -> TransferConfig:
    """The configuration for one engine.

    Args:
        argument: The caller's; wins over everything else.
        deepspeed_config: The DeepSpeed config as a mapping; empty where it is not known.

    Raises:
        ConfigError: The configuration that applies has mistakes; or the DeepSpeed config has a key
            that looks like a misspelt ``host_to_device_transfer``, which DeepSpeed would ignore, or
            an offload ``ratio`` below 1 together with NVMe, which fails in the first step.
    """
    _refuse_partial_nvme(deepspeed_config)
    if SECTION not in deepspeed_config:
        _refuse_misspelt_section(deepspeed_config)
    if argument is not None:
        return resolve_config(argument)
    section = deepspeed_config.get(SECTION)
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


def _refuse_partial_nvme(deepspeed_config: Mapping[str, Any]) -> None:
    zero = deepspeed_config.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    if not isinstance(offload, Mapping) or offload.get("device") != "nvme":
        return
    ratio = offload.get("ratio", 1.0)
    if isinstance(ratio, int | float) and ratio < 1:
        message = f"found {format_value(ratio)} with `device: nvme`; only `device: cpu` keeps a part on the device"
        raise ConfigError([ConfigProblem("zero_optimization.offload_optimizer.ratio", message)])


def _refuse_misspelt_section(deepspeed_config: Mapping[str, Any]) -> None:
    for key in deepspeed_config:
        if isinstance(key, str) and (key in _SHORT_FORMS or nearest(key, [SECTION], cutoff=0.8)):
            raise ConfigError([ConfigProblem(key, f"unknown key of the DeepSpeed config; did you mean {SECTION!r}?")])
