"""From pydantic's errors to sentences: where, what was found, what is allowed, what was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from accelerators.plugin_registry import nearest

from ..errors import ConfigError, ConfigProblem

Location = tuple[int | str, ...]
#: Where a location stands: its file and line.
Locate = Callable[[Location], tuple[str | None, int | None]]

_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}
#: The kinds of pydantic's errors for which there is a sentence here.
UNDERSTOOD = frozenset({"extra_forbidden", "missing", *_EXPECTED})


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    prefix: str = "",
    locate: Locate = lambda _location: (None, None),
) -> list[ConfigProblem]:
    """One problem for each of pydantic's errors.

    Args:
        error: What validating ``model`` raised.
        model: The root model, whose fields are what is allowed.
        prefix: Dotted path of the root, such as ``transfer``.
        locate: Gives the file and line of a location.
    """
    problems = []
    for entry in error.errors(include_url=False):
        location = entry["loc"]
        file, line = locate(location)
        problems.append(ConfigProblem(dotted(prefix, location), _sentence(entry, model), file, line))
    return problems


ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(
    model: type[ModelT], content: Mapping[str, Any], prefix: str, file: str | None, lines: Mapping[Location, int]
) -> ModelT:
    """``content`` as a ``model``.

    Args:
        model: The root model.
        content: What stands under ``prefix``.
        prefix: Dotted path of the content, for messages.
        file: The file that it comes from, if any.
        lines: The line of each key in that file. A missing key has none: the nearest enclosing one is shown.

    Raises:
        ConfigError: Every mistake, with its place.
    """

    def locate(location: Location) -> tuple[str | None, int | None]:
        while location and location not in lines:
            location = location[:-1]
        return file, lines.get(location)

    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(problems_of(error, model, prefix, locate)) from error


def dotted(prefix: str, location: Location) -> str:
    """``transfer.rules[0].when`` for ``("rules", 0, "when")``."""
    path = prefix
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _sentence(entry: Mapping[str, Any], model: type[BaseModel]) -> str:
    kind, location, value = entry["type"], entry["loc"], entry["input"]
    if kind == "extra_forbidden":
        return unknown_key(str(location[-1]), model, location[:-1])
    if kind == "missing":
        return "this key is required"
    expected = f"expected {_EXPECTED[kind]}" if kind in _EXPECTED else entry["msg"]
    return f"found {format_value(value)}: {expected}"


def format_value(value: object) -> str:
    """The value and its type, for messages, cut where it is long."""
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a very long number"
    return f"{text[:60]} ({'str' if isinstance(value, str) else type(value).__name__})"


def unknown_key(key: str, model: type[BaseModel], parent: Location = ()) -> str:
    """Why ``key`` is not allowed in the mapping at ``parent``, and what to write instead."""
    here: type[BaseModel] | None = model
    for part in parent:
        if isinstance(part, str) and here is not None:
            here = children_of(here).get(part)
    allowed = _keys(here) if here is not None else []
    elsewhere = [path for path, keys in _all_keys(model) if key in keys and path != dotted("", parent)]
    guess = getattr(here, "renamed", {}).get(key) or nearest(key, allowed)
    hint = ""
    if "" in elsewhere:
        hint = " It belongs at the top of the configuration."
    elif elsewhere:
        hint = f" It belongs under {' or '.join(map(repr, elsewhere))}."
    elif guess is not None:
        hint = f" Did you mean {guess!r}?"
    return f"unknown key {key!r}.{hint} Allowed here: {', '.join(allowed) or 'nothing'}."


def _keys(model: type[BaseModel]) -> list[str]:
    return sorted({*model.model_fields, *children_of(model)})


def children_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The models nested in ``model``, by the key under which they stand."""
    children: dict[str, type[BaseModel]] = dict(getattr(model, "sections", dict)())
    for name, field in model.model_fields.items():
        nested = _model_in(field.annotation)
        if nested is not None:
            children[name] = nested
    return children


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner))), None)


def _all_keys(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, list[str]]]:
    yield path, _keys(model)
    for name, child in children_of(model).items():
        yield from _all_keys(child, f"{path}.{name}" if path else name)
