"""Configurations from YAML files, mappings and the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from .config import TransferConfig
from .errors import ConfigError, ConfigProblem
from .schema.environment import environment_path
from .schema.problems import Location, dotted, format_value, validated
from .schema.yaml_file import read_yaml

logger = logging.getLogger("transfer")

#: The key of a YAML file under which everything stands.
ROOT = "transfer"

ConfigLike = TransferConfig | Mapping[str, Any] | str | os.PathLike[str]


def load_config(path: str | os.PathLike[str]) -> TransferConfig:
    """Reads a YAML file whose one top-level key is ``transfer``.

    An empty file, or nothing under ``transfer``, means the defaults; that the file is empty is logged as a warning.

    Args:
        path: The file; a leading ``~`` is expanded.

    Raises:
        ConfigFileNotFoundError: There is no such file.
        ConfigFileError: It cannot be read.
        ConfigError: It is not YAML, or has unknown, duplicate, misplaced or ill-typed keys. Each
            mistake is listed with file, line, dotted key and what is allowed.
    """
    content, lines, file = read_yaml(path)
    if content is None:
        logger.warning("%s is empty, and the defaults apply; write `transfer: {}` there if that is meant", file)
        return TransferConfig()
    if not isinstance(content, dict):
        message = f"expected one top-level key, {ROOT!r}, found {format_value(content)}"
        raise ConfigError([ConfigProblem("", message, file, 1)])
    merged = lines.get(("<<",))  # the place of keys that come from elsewhere
    problems = [ConfigProblem(key, _misplaced(key), file, lines.get((key,), merged)) for key in content if key != ROOT]
    section = content.get(ROOT)
    if section is not None and not isinstance(section, dict):
        message = f"found {format_value(section)}: expected a mapping"
        problems.append(ConfigProblem(ROOT, message, file, lines.get((ROOT,))))
    if problems:
        raise ConfigError(problems)
    return _validate(section or {}, ROOT, file, {location[1:]: line for location, line in lines.items()})


def resolve_config(config: ConfigLike | None, origin: str = "") -> TransferConfig:
    """The configuration that ``config`` stands for.

    Args:
        config: A ``TransferConfig``; a mapping with the content of the ``transfer`` section; a
            path; or None for the file in ``$H2D_CONFIG`` if that is set, else the defaults.
        origin: Dotted path of a mapping, for messages.

    Raises:
        ConfigError: As ``load_config``, or ``config`` is of another kind.
    """
    if config is None:
        path = environment_path()
        return load_config(path) if path else TransferConfig()
    if isinstance(config, TransferConfig):
        return config
    if isinstance(config, Mapping):
        return _validate(dict(config), origin, None, {})
    if isinstance(config, str | os.PathLike):
        return load_config(config)
    raise ConfigError(f"expected a TransferConfig, a mapping or the path of a YAML file, found {format_value(config)}")


def _validate(content: dict[Any, Any], prefix: str, file: str | None, lines: dict[Location, int]) -> TransferConfig:
    strange = [key for key in content if not isinstance(key, str)]
    if strange:
        raise ConfigError([ConfigProblem(dotted(prefix, (str(key),)), "keys must be text") for key in strange])
    if file is None and ROOT in content:
        raise ConfigError(f"{dotted(prefix, (ROOT,))}: a mapping is the content of that section: leave {ROOT!r} out")
    return validated(TransferConfig, content, prefix, file, lines)


def _misplaced(key: str) -> str:
    if key in TransferConfig.model_fields or key in TransferConfig.sections():
        return f"this key belongs under {ROOT!r}"
    return f"unknown key {key!r}. Everything belongs under the one top-level key {ROOT!r}."
