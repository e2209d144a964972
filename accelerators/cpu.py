"""The host itself posing as the device: no streams, no events, and nothing to pin for."""

from __future__ import annotations

import functools

from torch import Tensor

from .deepspeed_adapter import DeepSpeedAdapter
from .protocol import Capabilities


class CpuAccelerator(DeepSpeedAdapter):
    """DeepSpeed's CPU accelerator. Every tensor in host memory is on the host *and* on the device.

    ``pin_empty`` returns ordinary memory, except under ``DS_PIN_MEMORY_BACKEND=native``, where it
    is page-locked. Copies use no link in either case.
    """

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        alone = "The CPU accelerator runs all work on the calling thread, so it has no {}."
        return Capabilities(
            streams=False,
            events=False,
            pins_host_memory=False,
            registers_host_memory=False,
            copies_asynchronously=False,
            reasons={
                "streams": alone.format("streams"),
                "events": alone.format("events"),
                "pins_host_memory": "The CPU accelerator computes in host memory, so there is no device to pin it for.",
                "registers_host_memory": "The CPU accelerator computes in host memory: no device to register it with.",
                "copies_asynchronously": "On the CPU accelerator every copy is finished when it returns.",
            },
        )

    def on_device(self, tensor: Tensor) -> bool:
        return self.on_host(tensor)
