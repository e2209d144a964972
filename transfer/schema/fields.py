"""Field types of configurations, also for your own strategies: counts, sizes in bytes, dtypes, names."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, PlainSerializer
from pydantic_core import PydanticCustomError

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def refuse(reason: str) -> PydanticCustomError:
    """An error whose sentence reaches the user as it is."""
    return PydanticCustomError("h2d", "{reason}", {"reason": reason})


def _count_of(what: str, example: int, largest: int) -> BeforeValidator:
    """Allows whole numbers from 1 to ``largest``."""

    def check(value: Any) -> int:
        if type(value) is not int:
            number = _as_number(value)
            hint = f"write it out: {number}" if number is not None else f"such as {example}"
            if isinstance(value, str) and _SIZE.fullmatch(value):
                hint = f"this counts {what}, not bytes, and takes no unit: {hint}"
            raise refuse(f"expected a whole number of {what}; {hint}")
        if not 1 <= value <= largest:
            raise refuse(f"expected from 1 to {largest} {what}")
        return value

    return BeforeValidator(check)


def _as_number(value: Any) -> int | None:
    """The whole number that ``1e8`` or ``1.0e8`` (which YAML reads as text) or 1.0e+8 stands for."""
    if isinstance(value, bool) or not isinstance(value, str | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def parse_size(value: Any) -> int:
    """Bytes, from a whole number or text such as ``1MiB``; raises ``PydanticCustomError``."""
    if type(value) is int and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        number = _as_number(value)
        hint = f"write {number}" if number is not None else "such as 1048576 or 1MiB"
        raise refuse(f"expected a size in bytes, with or without a unit ({', '.join(_UNITS)}); {hint}")
    number_text, unit = match.groups()
    if unit not in _UNITS:
        letter = unit[0].upper()
        meant = f"write {number_text}{letter}iB or {number_text}{letter}B" if letter in "KMG" else ", ".join(_UNITS)
        raise refuse(f"unknown unit {unit!r}; {meant}")
    size = Decimal(number_text) * _UNITS[unit]
    if size != int(size):
        raise refuse("this is not a whole number of bytes")
    return int(size)


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


def one_of(*choices: str) -> BeforeValidator:
    """Allows these texts alone."""

    def check(value: Any) -> str:
        if value not in choices:
            *others, last = choices
            raise refuse(f"expected {', '.join(others)} or {last}.{left_out(value)}")
        return str(value)

    return BeforeValidator(check)


def left_out(value: Any) -> str:
    """A hint for values that are meant as the default; empty for others."""
    return " Leave the key out for the default." if value in ("auto", "default") else ""


def _flag(value: Any) -> bool:
    value = getattr(value, "means", value)  # as YAML 1.1 has it: yes, no, on, off
    if not isinstance(value, bool):
        raise refuse("expected true or false")
    return value


# The largest counts are larger than any use, and small enough to catch a slip.
#: A whole number of elements, from 1 to 2^30.
Elements = Annotated[int, _count_of("elements", example=2**24, largest=2**30)]
#: A whole number of buffers, from 1 to 64.
BufferCount = Annotated[int, _count_of("buffers", example=2, largest=64)]
#: A size in bytes, as a number or with a unit. None only as a default: a user must write a value.
SizeBytes = Annotated[int | None, BeforeValidator(parse_size)]
#: A torch dtype, by name. None only as a default.
DtypeName = Annotated[Any, BeforeValidator(_dtype), PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."))]
#: True or false, and nothing that merely looks like it.
Truth = Annotated[bool, BeforeValidator(_flag)]
#: The same. None only as a default.
Flag = Annotated[bool | None, BeforeValidator(_flag)]
#: A whole number of threads, from 1 to 256.
ThreadCount = Annotated[int, _count_of("threads", example=8, largest=256)]
#: A directory; ``~`` stands for the home directory.
SomeDirectory = Annotated[str, BeforeValidator(_directory)]
#: The same. None only as a default.
Directory = Annotated[str | None, BeforeValidator(_directory)]
