"""A configuration file of either kind, ours in YAML or DeepSpeed's in JSON, with every mistake in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import TransferConfig
from ..config_file import load_config
from ..errors import ConfigError, ConfigProblem
from ..schema.problems import dotted, format_value
from ..schema.yaml_file import read_json, read_yaml
from ..zero3.config import SECTION, check_deepspeed_config, why_not_served


@dataclass(frozen=True)
class Checked:
    """What was found in a file.

    Attributes:
        kind: ``YAML`` or ``DeepSpeed JSON``.
        config: What it configures; None where there are mistakes.
        problems: The mistakes, in the order of lines.
        notes: Sentences on what is right, and may not be what is meant.
        deepspeed: The content of a DeepSpeed JSON.
    """

    kind: str
    config: TransferConfig | None
    problems: tuple[ConfigProblem, ...] = ()
    notes: tuple[str, ...] = ()
    deepspeed: Mapping[str, Any] = field(default_factory=dict)


def check(path: str) -> Checked:
    """Reads and checks a file; one whose name ends in ``.json`` is DeepSpeed's. Never raises ``ConfigError``."""
    is_json = Path(path).suffix.lower() == ".json"
    kind = "DeepSpeed JSON" if is_json else "YAML"
    try:
        return _check_json(path) if is_json else Checked(kind, load_config(path), notes=_notes_on(path))
    except ConfigError as error:
        return Checked(kind, None, error.problems)


def _notes_on(path: str) -> tuple[str, ...]:
    if read_yaml(path)[0] is not None:
        return ()
    return ("The file is empty, so the defaults apply. Write `transfer: {}` there if that is meant.",)


def _check_json(path: str) -> Checked:
    content, lines, file = read_json(path)
    kind = "DeepSpeed JSON"
    if not isinstance(content, dict):
        problem = ConfigProblem("", f"expected a DeepSpeed config, found {format_value(content)}", file, 1)
        return Checked(kind, None, (problem,))
    config, problems = check_deepspeed_config(content)
    places = {dotted("", location): line for location, line in lines.items()}
    placed = [each if each.file else replace(each, file=file, line=_line(places, each.key)) for each in problems]
    notes = why_not_served(content)
    if SECTION not in content:
        notes.append(f"It has no key `{SECTION}`, so the defaults apply.")
    notes.append("The key configures, and activates nothing: `h2d run`, `zero3.attach` or `zero3.install` does.")
    return Checked(kind, config, tuple(sorted(placed, key=lambda each: each.line or 0)), tuple(notes), content)


def _line(places: Mapping[str, int], key: str) -> int | None:
    """The line of a key, or of the nearest one around it."""
    while key and key not in places:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return places.get(key)
