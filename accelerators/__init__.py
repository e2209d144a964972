"""Accelerators for host-to-device transfers: one small protocol over every backend.

``get_accelerator()`` returns an ``Accelerator`` with DeepSpeed's own names and its
``Capabilities``. ``register_accelerator`` and the entry-point group ``transfer.accelerators`` add
backends; ``accelerators.testing.AcceleratorConformance`` checks one. Importing this package imports
neither torch nor deepspeed.
"""

from __future__ import annotations

from .base import BaseAccelerator
from .errors import (
    AcceleratorError,
    AcceleratorRegistrationError,
    AcceleratorUnavailableError,
    InFlightError,
    InvalidAcceleratorError,
    UnknownAcceleratorError,
)
from .protocol import Accelerator, Capabilities, Event, Stream
from .registry import (
    available_accelerators,
    get_accelerator,
    register_accelerator,
    set_accelerator,
    unregister_accelerator,
)

__all__ = [
    "Accelerator",
    "AcceleratorError",
    "AcceleratorRegistrationError",
    "AcceleratorUnavailableError",
    "BaseAccelerator",
    "Capabilities",
    "Event",
    "InFlightError",
    "InvalidAcceleratorError",
    "Stream",
    "UnknownAcceleratorError",
    "available_accelerators",
    "get_accelerator",
    "register_accelerator",
    "set_accelerator",
    "unregister_accelerator",
]
