"""What a measurement was made on, so that its figures can be judged later."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from accelerators import Accelerator

from .ranks import usable_cores


def describe(accelerator: Accelerator) -> dict[str, Any]:
    """The machine and its software; nothing that tells whose machine it is."""
    return {
        "accelerator": accelerator.name,
        "device": _device_name(accelerator),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed"),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
    }


def _device_name(accelerator: Accelerator) -> str | None:
    """The vendor's name of the current device, where torch's module for its kind knows one."""
    device = accelerator.device_empty(1, dtype=torch.float32).device
    get_device_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return None if get_device_name is None else str(get_device_name(device))


def _cpu_model() -> str:
    """From the kernel where there is one that tells; ``platform`` knows only the instruction set on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
