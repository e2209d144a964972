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
from .stage3 import asks_for_zenflow, deepspeed_config, zero_config

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
    return _of_section(section)


def check_deepspeed_config(given: Mapping[str, Any]) -> tuple[TransferConfig | None, list[ConfigProblem]]:
    """What a DeepSpeed config says of this package, and every mistake in that; ``None`` where there are some.

    ``$H2D_CONFIG``, which would win, is left aside. Of DeepSpeed's own keys, only those are looked at that this package
    cannot serve as they are.
    """
    config: TransferConfig | None = None
    problems: list[ConfigProblem] = []
    try:
        if SECTION not in given:
            _refuse_misspelt_section(given)
        config = _of_section(given.get(SECTION))
    except ConfigError as error:
        problems += error.problems
    offload = _offload_optimizer(given)
    if offload.get("device") == "nvme" and _is_below_one(offload.get("ratio", 1)):
        problems.append(_partial_nvme(offload["ratio"]))
    return None if problems else config, problems


def why_not_served(given: Mapping[str, Any]) -> list[str]:
    """What of a DeepSpeed config keeps copy-backs from being served, or from running on behind CPU Adam; sentences."""
    zero = given.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    offload, parameters = _offload_optimizer(given), zero.get("offload_param")
    found = []
    if zero.get("stage") not in (3, "3", "auto"):
        return [f"`zero_optimization.stage` is {zero.get('stage', 0)!r}: only stage 3 is served."]
    if offload.get("device") not in ("cpu", "nvme", "auto"):
        return ["`zero_optimization.offload_optimizer.device` is neither `cpu` nor `nvme`: nothing is copied back."]
    if offload.get("device") == "cpu" and _is_below_one(offload.get("ratio", 1)):
        found.append(f"`ratio` is {offload['ratio']}: the rest of the sub-groups stays on the device, with DeepSpeed.")
    if isinstance(parameters, Mapping) and parameters.get("device") == "nvme":
        found.append("`offload_param.device` is `nvme`: parameters in files stay with DeepSpeed's own code.")
    if asks_for_zenflow(zero):
        found.append("ZenFlow is on: each copy-back is served, and waits at once.")
    if offload.get("super_offload"):
        found.append("`super_offload` is on: each copy-back is served, and waits at once.")
    return found


def _of_section(section: Any) -> TransferConfig:
    if section is None:
        return TransferConfig()
    if not isinstance(section, Mapping | str):
        message = f"found {format_value(section)}: expected a mapping, or the path of a YAML file"
        raise ConfigError([ConfigProblem(SECTION, message)])
    return resolve_config(section, origin=SECTION)


def _offload_optimizer(given: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = given.get("zero_optimization")
    section = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _is_below_one(ratio: Any) -> bool:
    try:
        return float(ratio) < 1
    except (TypeError, ValueError):  # which DeepSpeed says itself
        return False


def _partial_nvme(ratio: Any) -> ConfigProblem:
    message = f"found {format_value(ratio)} with `device: nvme`; only `device: cpu` keeps a part on the device"
    return ConfigProblem("zero_optimization.offload_optimizer.ratio", message)


def _refuse_partial_nvme(engine: Any) -> None:
    """Goes by what DeepSpeed has made of its config: a number may stand in quotes there, or be left to a default."""
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    offload = getattr(zero_config(engine), "offload_optimizer", None)
    if offload is None:
        section = _offload_optimizer(deepspeed_config(engine))
        if not section:
            return
        try:
            offload = DeepSpeedZeroOffloadOptimizerConfig(**section)
        except ValueError:  # which DeepSpeed says itself
            return
    if offload.device == "nvme" and offload.ratio < 1:
        raise ConfigError([_partial_nvme(offload.ratio)])


def _refuse_misspelt_section(deepspeed_config: Mapping[str, Any]) -> None:
    for key in deepspeed_config:
        if isinstance(key, str) and (key in _SHORT_FORMS or nearest(key, [SECTION], cutoff=0.8)):
            raise ConfigError([ConfigProblem(key, f"unknown key of the DeepSpeed config; did you mean {SECTION!r}?")])
