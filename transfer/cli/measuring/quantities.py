"""Numbers as people write them on a command line."""

from __future__ import annotations

import argparse

from ...schema.quantities import leading_zero, whole_number

#: Other names that ``--dtypes`` accepts.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LARGEST = 2**62


def count(text: str) -> int:
    """A positive whole number: ``268435456``, ``2^28``, ``2**28``, ``256Mi``, ``1e9`` or ``1_000_000``.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    value = whole_number(text)
    if value is None or not 1 <= value <= _LARGEST:
        hint = leading_zero(text) or "such as 1000, 2^28, 256Mi or 1e9"
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, not {text!r}; {hint}")
    return value


def positive(text: str) -> float:
    """A number above 0, such as a rate in GB/s.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number above 0, such as 55 or 2.5, not {text!r}")
    return value


def dtype_name(text: str) -> str:
    """The name that torch has for a floating-point dtype.

    Raises:
        argparse.ArgumentTypeError: It is another dtype, or none.
    """
    name = _DTYPES.get(text, text)
    if name not in _DTYPES.values():
        raise argparse.ArgumentTypeError(f"expected one of {', '.join((*_DTYPES.values(), *_DTYPES))}, not {text!r}")
    return name


def format_count(elements: int) -> str:
    """``2^28`` for a power of two, else with thousands separated."""
    exponent = elements.bit_length() - 1
    return f"2^{exponent}" if elements == 2**exponent and exponent >= 10 else f"{elements:,}"
