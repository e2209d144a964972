"""The accelerators that are registered from the start. Adding one is adding a line here."""

from __future__ import annotations

import functools

from .protocol import Accelerator
from .registry import register_accelerator


def _deepspeed(name: str) -> Accelerator:
    from .deepspeed_adapter import make

    return make(name)


def _simulated() -> Accelerator:
    from .simulated.accelerator import SimulatedAccelerator

    return SimulatedAccelerator()


for _name in ("cpu", "cuda", "hpu", "klxpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu"):
    register_accelerator(_name, functools.partial(_deepspeed, _name))
register_accelerator("simulated", _simulated)
