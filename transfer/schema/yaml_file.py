"""A YAML file as plain values, and the line of each, which later messages show."""

from __future__ import annotations

import io
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


#: Numbers that YAML 1.1, which PyYAML reads, and YAML 1.2 or a person understand differently: 010 is 8, 1:30 is 90.
_AMBIGUOUS = re.compile(r"[-+]?0[0-9_]+(?!.*[.eE])|.*:")
#: The most that is read of a file: no configuration is as long, and a device or a wrong file may have no end.
_MOST_BYTES = 2**20


class Word(str):
    """One of ``yes no on off`` and their spellings: text, which a field that is true or false takes as that.

    Attributes:
        means: What YAML 1.1 takes it for.
    """

    means: bool

    def __new__(cls, text: str, means: bool) -> Word:
        word = super().__new__(cls, text)
        word.means = means
        return word

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


class _Loader(yaml.SafeLoader):
    """Gives errors of single values the place where the value stands; guesses at no value."""

    def construct_yaml_bool(self, node: yaml.ScalarNode) -> Any:
        text = str(self.construct_scalar(node))
        means: bool = super().construct_yaml_bool(node)
        return means if text.lower() in ("true", "false") else Word(text, means)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        self._refuse_ambiguous(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Any:
        self._refuse_ambiguous(node)
        return super().construct_yaml_float(node)

    def _refuse_ambiguous(self, node: yaml.ScalarNode) -> None:
        text = str(self.construct_scalar(node))
        if _AMBIGUOUS.match(text):
            raise ValueError("numbers have neither leading zeros nor colons here; put text in quotes")

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _UNREADABLE as error:
            problem = f"{node.value!r:.60} cannot be read as what it looks like ({error})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


_Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.construct_yaml_bool)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def read_yaml(path: str | os.PathLike[str]) -> tuple[Any, dict[Location, int], str]:
    """Reads one YAML document.

    Returns:
        Its content; the line, counted from 1, of every key and list entry; and the file's name.

    Raises:
        ConfigFileNotFoundError: There is no such file.
        ConfigFileError: It cannot be read.
        ConfigError: It is not YAML, has duplicate keys, or keys that are not text.
    """
    try:
        file = Path(path).expanduser()
        text = _read_text(file)
    except FileNotFoundError as error:
        raise ConfigFileNotFoundError([ConfigProblem("", "no such configuration file", str(file))]) from error
    except (OSError, ValueError, RuntimeError) as error:  # also: no text, a NUL in the path, no such user's home
        raise ConfigFileError([ConfigProblem("", f"cannot be read: {error}", os.fspath(path))]) from error
    lines: dict[Location, int] = {}
    problems: list[ConfigProblem] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _walk(node, (), lines, problems, str(file), set())
        content = None if problems or node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark is not None else None
        raise ConfigError([ConfigProblem("", f"this is not YAML: {reason}", str(file), line)]) from error
    except RecursionError as error:
        raise ConfigError([ConfigProblem("", "this is not YAML: nested too deeply", str(file))]) from error
    if problems:
        raise ConfigError(problems)
    return content, lines, str(file)


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
