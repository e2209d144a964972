"""Field types of configurations, also for your own strategies: counts, sizes in bytes, dtypes, names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import PlainSerializer
from pydantic_core import PydanticCustomError, core_schema

from .quantities import UNITS, leading_zero, size_bytes, whole_number

#: The words that YAML 1.1 takes for true and false; text in YAML 1.2, and here.
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
#: For editors; what is read is `whole_number`'s and `size_bytes`'s.
_TEXT_COUNT = r"^([1-9][0-9_]*|0x[0-9a-fA-F]+|[0-9.]+[eE][0-9]+|[0-9]+ ?(\^|\*\*) ?[0-9]+|[0-9.]+ ?[KMG]i)$"
_TEXT_SIZE = rf"{_TEXT_COUNT}|^[0-9.]+ ?({'|'.join(UNITS)})$"
_LARGEST_BYTES = 2**62


class Checked:
    """What stands in an ``Annotated``: a check of what was written, and what an editor is told of it.

    Args:
        check: Makes the value of what was written; raises ``refuse(...)``.
        schema: The JSON schema of what may be written; a function where it depends on what is registered.
    """

    def __init__(
        self, check: Callable[[Any], Any], schema: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    ) -> None:
        self._check = check
        self._schema = schema

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _core: Any, _handler: Any) -> dict[str, Any]:
        return dict(self._schema() if callable(self._schema) else self._schema)


def refuse(reason: str) -> PydanticCustomError:
    """An error whose sentence reaches the user as it is."""
    return PydanticCustomError("h2d", "{reason}", {"reason": reason})


def _count_of(what: str, example: int, largest: int) -> Checked:
    """Allows whole numbers from 1 to ``largest``."""

    def check(value: Any) -> int:
        number = whole_number(value)
        if number is None:
            hint = leading_zero(value) or f"such as {example}"
            if _has_unit(value):
                hint = f"this counts {what}, not bytes, and takes no unit: {hint}"
            raise refuse(f"expected a whole number of {what}; {hint}")
        if not 1 <= number <= largest:
            raise refuse(f"expected from 1 to {largest} {what}")
        return number

    allowed = [{"type": "integer", "minimum": 1, "maximum": largest}, {"type": "string", "pattern": _TEXT_COUNT}]
    return Checked(check, {"anyOf": allowed})


def _has_unit(value: Any) -> bool:
    try:
        return isinstance(value, str) and size_bytes(value) is not None
    except ValueError:
        return True


def parse_size(value: Any) -> int:
    """Bytes, from a whole number or text such as ``1MiB``; raises ``PydanticCustomError``."""
    try:
        size = size_bytes(value)
    except ValueError as error:
        raise refuse(str(error)) from None
    if size is None or size < 0:
        hint = leading_zero(value) or "such as 1048576, 2^20 or 1MiB"
        raise refuse(f"expected a size in bytes, with or without a unit ({', '.join(UNITS)}); {hint}")
    if size > _LARGEST_BYTES:
        raise refuse("no machine has so many bytes")
    return size


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    if not isinstance(found, torch.dtype):
        short = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(str(value))
        hint = f"; did you mean {short!r}?" if short else ", such as float32, bfloat16 or float16"
        raise refuse(f"expected the name of a torch dtype{hint}")
    return found


def _directory(value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not str(value).strip() or "\0" in str(value):
        raise refuse("expected the path of a directory")
    return os.path.expanduser(value)  # noqa: PTH111 - stays text, as in the file


def one_of(*choices: str) -> Checked:
    """Allows these texts alone."""

    def check(value: Any) -> str:
        if value not in choices:
            *others, last = choices
            raise refuse(f"expected {', '.join(others)} or {last}.{left_out(value)}")
        return str(value)

    return Checked(check, {"enum": list(choices)})


def left_out(value: Any) -> str:
    """A hint for values that are meant as the default; empty for others."""
    return " Leave the key out for the default." if value in ("auto", "default") else ""


def _flag(value: Any) -> bool:
    meant = _WORDS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(meant, bool):
        raise refuse("expected true or false")
    return meant


_SIZE = Checked(parse_size, {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _TEXT_SIZE}]})
_BOOLEAN = Checked(_flag, {"type": "boolean"})
_DTYPE = Checked(_dtype, {"type": "string", "examples": ["float32", "bfloat16", "float16"]})

# The largest counts are larger than any use, and small enough to catch a slip.
#: A whole number of elements, from 1 to 2^30.
Elements = Annotated[int, _count_of("elements", example=2**24, largest=2**30)]
#: A whole number of buffers, from 1 to 64.
BufferCount = Annotated[int, _count_of("buffers", example=2, largest=64)]
#: A size in bytes, as a number or with a unit. None only as a default: a user must write a value.
SizeBytes = Annotated[int | None, _SIZE]
#: A torch dtype, by name. None only as a default.
DtypeName = Annotated[Any, _DTYPE, PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."))]
#: True or false; also the words yes, no, on and off.
Truth = Annotated[bool, _BOOLEAN]
#: The same. None only as a default.
Flag = Annotated[bool | None, _BOOLEAN]
#: A whole number of threads, from 1 to 256.
ThreadCount = Annotated[int, _count_of("threads", example=8, largest=256)]
_DIRECTORY = Checked(_directory, {"type": "string", "minLength": 1})
#: A directory; ``~`` stands for the home directory.
SomeDirectory = Annotated[str, _DIRECTORY]
#: The same. None only as a default.
Directory = Annotated[str | None, _DIRECTORY]
