"""Tables of every key of the configuration, as Markdown, from the models that check it."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any, Union, get_args, get_origin

import torch
from pydantic import BaseModel

from transfer import Rule, TransferConfig, When
from transfer.config import Zero3Config

#: What may be written for a field, by the name of its type in the model's source.
ALLOWED = {
    "AcceleratorName | None": "a registered accelerator",
    "StrategyOrMeasured | None": "a registered strategy, or `measured`",
    "StrategyName": "a registered strategy",
    "Completion": "`deferred`, `immediate`",
    "Verify": "`off`, `sample`, `full`",
    "Cast": "`device`, `host`",
    "Reader": "`posix`",
    "Truth": "`true`, `false`",
    "Flag": "`true`, `false`",
    "Elements": "a number of elements, 1 to 2^30",
    "BufferCount": "a number of buffers, 1 to 64",
    "ThreadCount": "a number of threads, 1 to 256",
    "RequestBytes": "a size, a multiple of 4096",
    "SizeBytes": "a size",
    "DtypeName": "a torch dtype",
    "Directory": "a directory",
    "tuple[SomeDirectory, ...]": "a list of directories",
    "tuple[Rule, ...]": "a list of rules",
    "When": "a mapping of conditions",
    "Zero3Config": "a mapping",
}


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """What the docstring's section ``Attributes`` says of each field, on one line."""
    section = (inspect.getdoc(model) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", section, re.MULTILINE)
    words = (
        (r"\s*\n\s*", " "),
        ("``", "`"),
        (r"; None:", "; left out:"),
        (r"\bNone:", "Left out:"),
    )  # YAML has no None
    told = {}
    for name, text in entries:
        for pattern, word in words:
            text = re.sub(pattern, word, text)
        told[name] = text
    return told


def type_name(model: type[BaseModel], field: str) -> str:
    """The field's type as its class's source has it."""
    annotations = (inspect.get_annotations(base) for base in model.__mro__)
    return next(str(each[field]) for each in annotations if field in each)


def written(value: Any) -> str:
    """A default as YAML has it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, torch.dtype):
        return f"`{str(value).removeprefix('torch.')}`"
    if isinstance(value, tuple):
        return "none"
    if isinstance(value, int) and value >= 1024 and value & (value - 1) == 0:
        return f"`{value}` (2^{value.bit_length() - 1})"
    return f"`{value}`"


def is_mapping(annotation: Any) -> bool:
    """Whether a field holds another model, which has a table of its own."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return any(isinstance(each, type) and issubclass(each, BaseModel) for each in kinds)


def rows(model: type[BaseModel], prefix: str) -> list[str]:
    """The lines of a Markdown table, one for each field."""
    told = descriptions(model)
    lines = ["| key | may be | default | what it does |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        default = "" if is_mapping(field.annotation) or field.is_required() else written(field.get_default())
        allowed = ALLOWED[type_name(model, name)]
        lines.append(f"| `{prefix}{name}` | {allowed} | {default} | {told[name]} |".replace("  ", " "))
    return lines


def markdown() -> list[str]:
    """All tables, as lines of Markdown."""
    lines = ["## Everything under `transfer`", "", *rows(TransferConfig, ""), ""]
    for name, model in TransferConfig.sections().items():
        if model.model_fields:
            lines += [f"## The section `{name}`", "", *rows(model, f"{name}."), ""]
    lines += ["## The section `zero3`", "", *rows(Zero3Config, "zero3."), ""]
    lines += ["## Rules", "", *rows(Rule, "rules[]."), ""]
    return [*lines, "All conditions of a rule must hold, and one must be given:", "", *rows(When, "rules[].when.")]
