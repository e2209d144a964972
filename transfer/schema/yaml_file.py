"""A YAML file as plain values, and the line of each, which later messages show."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, ConfigFileError, ConfigFileNotFoundError, ConfigProblem
from .problems import Location, dotted

_TEXT_KEYS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")

#: What PyYAML lets through from a scalar that its tag does not fit, such as ``2001-13-45``.
_UNREADABLE = (ValueError, KeyError, AttributeError, TypeError, OverflowError)


#: The most that is read of a file: no configuration is as long, and a device or a wrong file may have no end.
_MOST_BYTES = 2**20


class _Loader(yaml.SafeLoader):
    """Takes scalars for what YAML 1.2's core schema does, and gives errors of single values the place of the value.

    PyYAML is of YAML 1.1, which takes ``off`` for false, ``010`` for 8, ``1:30`` for 90 and ``1e5`` for text. Here
    the first three are text, which is refused where a number is expected, and the last one is a number.
    """

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        return int(str(self.construct_scalar(node)), 0)  # with 0o and 0x

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Any:
        return float(str(self.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _UNREADABLE as error:
            problem = f"{node.value!r:.60} cannot be read as what it looks like ({error})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


#: The scalars of YAML 1.2's core schema: tag, form, first characters. A number with a leading zero is left out, as it
#: means 8 times as much to some. And ``<<``, which YAML 1.2 has dropped and files use.
_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)
_Loader.yaml_implicit_resolvers = {}  # none of PyYAML's
for _tag, _form, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_form})\Z"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def read_json(path: str | os.PathLike[str]) -> tuple[Any, dict[Location, int], str]:
    """As ``read_yaml``, for a JSON document."""
    text, file = _text_of(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError([ConfigProblem("", f"this is not JSON: {error}", file, line)]) from error
    # JSON is YAML, but for tabs between its parts: its lines are found as those of YAML are.
    _, lines = _parse(text.replace("\t", " "), file)
    return content, lines, file


def read_yaml(path: str | os.PathLike[str]) -> tuple[Any, dict[Location, int], str]:
    """Reads one YAML document.

    Returns:
        Its content; the line, counted from 1, of every key and list entry; and the file's name.

    Raises:
        ConfigFileNotFoundError: There is no such file.
        ConfigFileError: It cannot be read.
        ConfigError: It is not YAML, has duplicate keys, or keys that are not text.
    """
    text, file = _text_of(path)
    content, lines = _parse(text, file)
    return content, lines, file


def _text_of(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The content of a file, and its name."""
    file = Path(path)
    try:
        file = file.expanduser()
        return _read_text(file), str(file)
    except FileNotFoundError as error:
        raise ConfigFileNotFoundError([ConfigProblem("", "no such configuration file", str(file))]) from error
    except (OSError, ValueError, RuntimeError) as error:  # also: no text, a NUL in the path, no such user's home
        raise ConfigFileError([ConfigProblem("", f"cannot be read: {error}", os.fspath(path))]) from error


def _parse(text: str, file: str) -> tuple[Any, dict[Location, int]]:
    """The content of a document, and the line of each key and list entry."""
    lines: dict[Location, int] = {}
    problems: list[ConfigProblem] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _walk(node, (), lines, problems, file, set())
        content = None if problems or node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark is not None else None
        raise ConfigError([ConfigProblem("", f"this is not YAML: {reason}", file, line)]) from error
    except RecursionError as error:
        raise ConfigError([ConfigProblem("", "this is not YAML: nested too deeply", file)]) from error
    if problems:
        raise ConfigError(problems)
    return content, lines


def _read_text(file: Path) -> str:
    with file.open("rb") as stream:
        content = stream.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it is longer than {_MOST_BYTES} bytes, and so no configuration")
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()  # with any line ends


def _walk(
    node: Any, path: Location, lines: dict[Location, int], problems: list[ConfigProblem], file: str, seen: set[int]
) -> None:
    """Notes the line of each key and list entry, and keys that are not text or duplicate."""
    if id(node) in seen:  # an alias: its lines are those of its anchor
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "(a mapping or list)"
            line = key_node.start_mark.line + 1
            location = (*path, key)
            message = None
            if key_node.tag not in _TEXT_KEYS:
                message = f"keys must be text, and YAML reads {key!r:.60} as something else; quote it"
            elif key in first:
                message = f"duplicate key; first on line {first[key]}"
            if message is not None:
                problems.append(ConfigProblem(dotted("", location), message, file, line))
            first[key] = lines[location] = line
            _walk(value_node, location, lines, problems, file, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            lines[(*path, index)] = entry.start_mark.line + 1
            _walk(entry, (*path, index), lines, problems, file, seen)
