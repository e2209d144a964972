"""A JSON schema of the configuration, for editors, made by pydantic from the models and their docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .problems import children_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(model: type[BaseModel], sections: Mapping[str, type[BaseModel]], root: str) -> dict[str, Any]:
    """The schema of a file whose one top-level key is ``root``.

    Args:
        model: What stands under that key.
        sections: Further keys beside the model's fields, each with the model of what stands there.
        root: The key.
    """
    definitions: dict[str, Any] = {}
    content = _schema_of(model, definitions)
    for name, section in sections.items():
        content["properties"][name] = {**_schema_of(section, definitions), "type": ["object", "null"]}
    content["additionalProperties"] = False
    content["type"] = ["object", "null"]
    return {
        "$schema": DIALECT,
        "title": "host-to-device-transfer",
        "type": "object",
        "properties": {root: content},
        "required": [root],
        "additionalProperties": False,
        **({"$defs": definitions} if definitions else {}),
    }


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """What the docstring says of each field, under ``Attributes:``, in one line each."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel):
            continue
        _, _, attributes = (inspect.getdoc(base) or "").partition("Attributes:\n")
        for name, text in re.findall(r"(?ms)^    (\w+): (.*?)(?=^    \w+: |^\S|\Z)", attributes):
            found[name] = re.sub(r"\bNone: ", "left out: ", " ".join(text.split())).replace("``", "`")
    return found


def _schema_of(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/$defs/{model}", mode="validation")
    definitions.update(schema.pop("$defs", {}))
    _describe(schema, model)
    for nested in _nested(model):
        if nested.__name__ in definitions:
            _describe(definitions[nested.__name__], nested)
    return schema


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """The first line of the docstring for the whole, and a line for each field; pydantic's titles say nothing."""
    schema["description"] = (inspect.getdoc(model) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
    schema.pop("title", None)
    about = descriptions(model)
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        if name in about:
            field["description"] = about[name]
        if field.get("default", ...) is None:
            del field["default"]  # left out means something else than null, which may not be written


def _nested(model: type[BaseModel]) -> list[type[BaseModel]]:
    children = [each for name, each in children_of(model).items() if name in model.model_fields]
    return [*children, *(inner for each in children for inner in _nested(each))]
