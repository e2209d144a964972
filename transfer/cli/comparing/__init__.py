"""``h2d run --compare N``: a script's own steps, by turns with DeepSpeed's copy-back and with this package.

``turns`` says whose turn each step is, ``comparison`` takes the steps of one engine, ``report`` makes figures of them.
``begin`` is called in every process below ``h2d run`` that has imported deepspeed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

#: The number of steps of each, and the file for the result.
VARIABLE, FILE_VARIABLE = "H2D_COMPARE", "H2D_COMPARE_JSON"


def begin(say: Callable[[str], object]) -> None:
    """Lets the first ZeRO-3 engine of this process that makes a step be compared, if that was asked for.

    ``step`` of DeepSpeed's engine is wrapped: the public call that ends an iteration, under every framework.

    Args:
        say: Writes a line for people.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return
    from ...zero3.stage3 import engine_class
    from .comparison import Comparison

    comparison = Comparison(int(asked), say, os.environ.get(FILE_VARIABLE))
    engines: Any = engine_class()
    original = engines.step

    @functools.wraps(original)
    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return comparison.step(engine, lambda: original(engine, *args, **kwargs))

    engines.step = step
