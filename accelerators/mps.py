"""Apple's Metal: one in-order queue, unified memory, and an ``is_pinned`` that is always True."""

from __future__ import annotations

import dataclasses
import functools

from torch import Tensor

from .deepspeed_adapter import DeepSpeedAdapter
from .protocol import Capabilities


class MpsAccelerator(DeepSpeedAdapter):
    """DeepSpeed's MPS accelerator.

    DeepSpeed answers ``is_pinned`` with True for every tensor here. Nothing is pinned: a
    non-blocking copy out of host memory that is freed too early delivers garbage (pytorch issue
    139550), so this adapter says False and copies from the host block.
    """

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        general = super().capabilities
        reasons = {
            **general.reasons,
            "streams": "MPS runs everything on one in-order queue and shows no streams.",
            "pins_host_memory": "MPS shares the host's memory, so there is nothing to pin.",
            "copies_asynchronously": "Copies to MPS from host memory are finished when they return.",
        }
        return dataclasses.replace(
            general,
            pins_host_memory=False,
            copies_asynchronously=False,
            pin_rounds_to_power_of_two=False,
            reasons=reasons,
        )

    def is_pinned(self, tensor: Tensor) -> bool:
        return False

    def on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == "mps"

    def enqueue_copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)
