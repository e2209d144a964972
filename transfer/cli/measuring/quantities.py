"""Numbers as people write them on a command line."""

from __future__ import annotations

import argparse
from decimal import Decimal, InvalidOperation

#: What ``--dtypes`` accepts, and torch's name for it.
DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float32": "float32",
    "fp32": "float32",
}

_LARGEST = 2**62


def count(text: str) -> int:
    """A positive whole number: ``268435456``, ``2^28``, ``2**28``, ``1e9`` or ``1_000_000``.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    base, power, exponent = text.replace("**", "^").partition("^")
    try:
        value = Decimal(base) if not power else Decimal(int(base) ** int(exponent) if int(exponent) <= 62 else 0)
    except (ValueError, ZeroDivisionError, InvalidOperation):
        value = Decimal(0)
    if not (value.is_finite() and 1 <= value <= _LARGEST and value == int(value)):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, such as 1000, 2^28 or 1e9, not {text!r}")
    return int(value)


def dtype_name(text: str) -> str:
    """The name that torch has for a floating-point dtype.

    Raises:
        argparse.ArgumentTypeError: It is not one of ``DTYPES``.
    """
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, not {text!r}")
    return DTYPES[text]


def format_count(elements: int) -> str:
    """``2^28`` for a power of two, else with thousands separated."""
    exponent = elements.bit_length() - 1
    return f"2^{exponent}" if elements == 2**exponent and exponent >= 10 else f"{elements:,}"


def format_bytes(num_bytes: int) -> str:
    """In a unit that fits: ``256 KiB``."""
    unit, scale = ("MiB", 2**20) if num_bytes >= 2**20 else ("KiB", 2**10)
    return f"{num_bytes / scale:.4g} {unit}"
