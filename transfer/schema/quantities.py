"""Whole numbers and sizes as people write them, the same on the command line and in configurations."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

#: What may follow a number of bytes.
UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
#: What may follow a number of anything.
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_NUMBER = r"[-+]?(?:\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?|0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+)"
_WITH_UNIT = re.compile(rf"({_NUMBER})\s*([A-Za-z]+)")
_POWER = re.compile(r"(\d[\d_]*)\s*(?:\^|\*\*)\s*(\d+)")
#: No count is longer, and no power larger.
_MOST_CHARACTERS = 40
_MOST_BITS = 63


def whole_number(value: Any) -> int | None:
    """The whole number that is meant, or None if it is none.

    Takes whole numbers themselves, also as floats, and text: ``1000``, ``1_000``, ``1e9``, ``2^24``, ``2**24``,
    ``16Mi``, ``0x400000``. A leading zero is refused: ``010`` is 8 to some, and 10 to others.
    """
    if type(value) is int:
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        return None
    text = value.strip()
    power = _POWER.fullmatch(text)
    if power is not None:
        base, exponent = int(power[1]), int(power[2])
        return base**exponent if base.bit_length() * exponent <= 2 * _MOST_BITS else None
    factor = 1
    with_unit = _WITH_UNIT.fullmatch(text)
    if with_unit is not None and with_unit[2] in _BINARY:
        text, factor = with_unit[1], _BINARY[with_unit[2]]
    number = _plain(text)
    return None if number is None or number * factor != int(number * factor) else int(number * factor)


def size_bytes(value: Any) -> int | None:
    """The bytes that are meant: as ``whole_number``, or with one of ``UNITS``; None if they are none.

    Raises:
        ValueError: Something is near to a size; the message says what to write.
    """
    match = _WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2] in _BINARY:
        return whole_number(value)
    text, unit = match.groups()
    if _plain(text + unit) is not None:  # the end of a number such as 0x1B
        return whole_number(value)
    if unit not in UNITS:
        letter = unit[0].upper()
        meant = f"write {text}{letter}iB or {text}{letter}B" if letter in "KMG" else ", ".join(UNITS)
        raise ValueError(f"unknown unit {unit!r}; {meant}")
    number = _plain(text)
    if number is None:
        return None
    size = number * UNITS[unit]
    if size != int(size):
        raise ValueError("this is not a whole number of bytes")
    return int(size)


def leading_zero(value: Any) -> str | None:
    """What to write in place of a number with a leading zero, which means 8 to some and 10 to others; else None."""
    text = value.strip() if isinstance(value, str) else ""
    if re.fullmatch(r"[-+]?0[0-9_]+", text) is None:
        return None
    return "leave the leading zero out: " + (text.replace("_", "").lstrip("+-0") or "0")


def _plain(text: str) -> Decimal | None:
    """A number without a unit."""
    if re.fullmatch(_NUMBER, text) is None or leading_zero(text) is not None:
        return None
    try:
        return Decimal(int(text, 0))
    except ValueError:  # a point, or an exponent
        pass
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() and number.adjusted() < _MOST_BITS else None
