"""What a measurement was made on, so that its figures can be judged later."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import platform
from typing import Any

import torch

from accelerators import Accelerator
from accelerators.hardware import cpu_model, device_name

from .ranks import usable_cores


def describe(accelerator: Accelerator) -> dict[str, Any]:
    """The machine and its software; nothing that tells whose machine it is."""
    return {
        "accelerator": accelerator.name,
        "device": device_name(accelerator),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed"),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
    }
