"""Machine profiles as YAML files: where they are, how they are read and written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from ..errors import ConfigError, ConfigFileError, ConfigFileNotFoundError, ConfigProblem
from ..schema.problems import format_value, validated
from ..schema.yaml_file import read_yaml
from .place import ENVIRONMENT_VARIABLE
from .place import default_path as default_path

ModelT = TypeVar("ModelT", bound=BaseModel)

#: The key of the file under which everything stands.
ROOT = "machine_profile"

_HEADER = """\
# How fast this machine moves values from host memory to the device. `h2d tune` has measured and written it;
# `strategy: measured` reads it. Measure again after a change of hardware, driver, torch, ranks or host threads.
"""


def load_profile(model: type[ModelT], version: int, path: str | os.PathLike[str] | None = None) -> ModelT | None:
    """Reads a profile of this ``version`` as a ``model``; see ``MachineProfile.load``."""
    named = path if path is not None else os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    try:
        content, lines, file = read_yaml(named or default_path())
    except ConfigFileNotFoundError as error:
        if not named:
            return None
        origin = "" if path is not None else f" (${ENVIRONMENT_VARIABLE} names it)"
        message = f"no such machine profile{origin}; `h2d tune` writes one"
        raise ConfigFileNotFoundError([ConfigProblem("", message, os.fspath(named))]) from error
    section = content.get(ROOT) if isinstance(content, dict) else None
    if not isinstance(content, dict) or set(content) != {ROOT} or not isinstance(section, dict):
        message = f"this is no machine profile: expected one top-level key, {ROOT!r}, with a mapping under it"
        raise ConfigError([ConfigProblem("", message, file, 1)])
    lines = {location[1:]: line for location, line in lines.items()}
    found = section.get("format_version")
    if found != version or isinstance(found, bool):  # before anything else, which may have other keys there
        message = f"found {format_value(found)}: this version reads format {version}; run `h2d tune` again"
        raise ConfigError([ConfigProblem(f"{ROOT}.format_version", message, file, lines.get(("format_version",), 1))])
    return validated(model, section, ROOT, file, {(): 1, **lines})


def save_profile(profile: BaseModel, path: str | os.PathLike[str] | None = None) -> str:
    """As ``MachineProfile.save``."""
    named = path if path is not None else os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    try:
        # Resolved, so that the file behind a link is replaced, and not the link.
        file = Path(named or default_path()).expanduser().resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        _replace(file, _HEADER + profile_yaml(profile))
    except (OSError, ValueError, RuntimeError) as error:  # also: a NUL in the path, no such user's home
        raise ConfigFileError([ConfigProblem("", f"cannot be written: {error}", os.fspath(named))]) from error
    return str(file)


def profile_yaml(profile: BaseModel) -> str:
    """The content of the file, each measurement on a line of its own."""
    return yaml.dump({ROOT: profile.model_dump()}, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _replace(file: Path, text: str) -> None:
    # Beside the file, because a rename is atomic only within one file system; named by process, because several
    # may write at once; a new file, so that it has the permissions of new files, and is no link of somebody else's.
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)  # of a dead process
    try:
        with beside.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


class _Dumper(yaml.SafeDumper):
    """Block style; flow style for list entries that hold only plain values."""


def _entries(dumper: _Dumper, values: Any) -> yaml.Node:
    node = dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=False)
    for entry in node.value:
        if isinstance(entry, yaml.MappingNode):
            entry.flow_style = all(isinstance(value, yaml.ScalarNode) for _, value in entry.value)
    return node


_Dumper.add_representer(list, _entries)
_Dumper.add_representer(tuple, _entries)
