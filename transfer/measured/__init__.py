"""``strategy: measured``: a profile of this machine, and which strategy it expects to be fastest.

A name is loaded when it is asked for: ``place`` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimate import CANDIDATES, fastest
    from .profile import MachineProfile

__all__ = ["CANDIDATES", "MachineProfile", "fastest"]

_MODULES = {"CANDIDATES": "estimate", "MachineProfile": "profile", "fastest": "estimate"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
