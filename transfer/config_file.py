"""Configurations from YAML files, mappings and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .config import TransferConfig
from .config_errors import Location, dotted, problems_of
from .errors import ConfigError, ConfigFileError, ConfigFileNotFoundError, ConfigProblem

#: The key of a YAML file under which everything stands.
ROOT = "transfer"
#: Names the YAML file to use where no configuration is given as an argument.
ENVIRONMENT_VARIABLE = "H2D_CONFIG"

_TEXT_KEYS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")

ConfigLike = TransferConfig | Mapping[str, Any] | str | os.PathLike[str]


def load_config(path: str | os.PathLike[str]) -> TransferConfig:
    """Reads a YAML file whose one top-level key is ``transfer``.

    An empty file, or nothing under ``transfer``, means the defaults.

    Args:
        path: The file; a leading ``~`` is expanded.

    Raises:
        ConfigFileNotFoundError: There is no such file.
        ConfigFileError: It cannot be read.
        ConfigError: It is not YAML, or has unknown, duplicate, misplaced or ill-typed keys. Each
            mistake is listed with file, line, dotted key and what is allowed.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigFileNotFoundError([ConfigProblem("", "no such configuration file", str(file))]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError([ConfigProblem("", f"cannot be read: {error}", str(file))]) from error
    lines, content = _parse(text, str(file))
    return _validate(content, ROOT, str(file), lines)


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
        path = os.environ.get(ENVIRONMENT_VARIABLE)
        return load_config(path) if path else TransferConfig()
    if isinstance(config, TransferConfig):
        return config
    if isinstance(config, Mapping):
        return _validate(dict(config), origin, None, {})
    if isinstance(config, str | os.PathLike):
        return load_config(config)
    raise ConfigError(
        f"expected a TransferConfig, a mapping or the path of a YAML file, found {config!r} ({type(config).__name__})"
    )


def _validate(content: dict[Any, Any], prefix: str, file: str | None, lines: dict[Location, int]) -> TransferConfig:
    def locate(location: Location) -> tuple[str | None, int | None]:
        # A key that is missing has no line of its own: the nearest enclosing one is shown.
        while location and location not in lines:
            location = location[:-1]
        return file, lines.get(location)

    strange = [key for key in content if not isinstance(key, str)]
    if strange:
        raise ConfigError([ConfigProblem(dotted(prefix, (str(key),)), "keys must be text") for key in strange])
    if file is None and ROOT in content:
        raise ConfigError(f"{dotted(prefix, (ROOT,))}: a mapping is the content of that section: leave {ROOT!r} out")
    try:
        return TransferConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(problems_of(error, TransferConfig, prefix, locate)) from error


def _parse(text: str, file: str) -> tuple[dict[Location, int], dict[Any, Any]]:
    """The content under ``transfer``, and the line of each location in it."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        problems: list[ConfigProblem] = []
        lines: dict[Location, int] = {}
        _walk(node, (), lines, problems, file)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark is not None else None
        raise ConfigError([ConfigProblem("", f"this is not YAML: {reason}", file, line)]) from error
    if problems:
        raise ConfigError(problems)
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError([ConfigProblem("", f"expected one top-level key, {ROOT!r}, found a {kind}", file, 1)])
    problems = [ConfigProblem(key, _misplaced(key), file, lines.get((key,))) for key in content if key != ROOT]
    section = content.get(ROOT)
    if section is not None and not isinstance(section, dict):
        kind = type(section).__name__
        problems.append(
            ConfigProblem(ROOT, f"found {section!r:.60} ({kind}): expected a mapping", file, lines.get((ROOT,)))
        )
    if problems:
        raise ConfigError(problems)
    return {location[1:]: line for location, line in lines.items()}, section or {}


def _misplaced(key: Any) -> str:
    if key in TransferConfig.model_fields or key in TransferConfig.sections():
        return f"this key belongs under {ROOT!r}"
    return f"unknown key {key!r}. Everything stands under the one top-level key {ROOT!r}."


def _walk(
    node: Any,
    path: Location,
    lines: dict[Location, int],
    problems: list[ConfigProblem],
    file: str,
    parents: tuple[Any, ...] = (),
) -> None:
    """Notes the line of each key and list entry, and every key that stands twice."""
    if node in parents:  # an anchor inside itself
        return
    parents = (*parents, node)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(getattr(key_node, "value", key_node))
            line = key_node.start_mark.line + 1
            location = (*path, key)
            message = None
            if key_node.tag not in _TEXT_KEYS:
                message = (
                    f"keys must be text, and YAML reads {key!r} as something else; put it in quotes if it is meant"
                )
            elif key in seen:
                message = f"this key stands on line {seen[key]} already"
            if message is not None:
                problems.append(ConfigProblem(dotted("", location), message, file, line))
            seen[key] = lines[location] = line
            _walk(value_node, location, lines, problems, file, parents)
    elif isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            lines[(*path, index)] = entry.start_mark.line + 1
            _walk(entry, (*path, index), lines, problems, file, parents)
