"""What hardware this is, by names that stay the same from run to run: to tell whose measurements they are."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

from .protocol import Accelerator


def device_name(accelerator: Accelerator) -> str:
    """The model of the current device, such as ``NVIDIA H200``; the accelerator's own name where none is known.

    By feature test: torch's runtime of that name (``torch.cuda``, ``torch.xpu``, ``torch.npu``, ...) is asked
    where there is one. Never raises because the device cannot be asked.
    """
    ask = getattr(getattr(torch, accelerator.name, None), "get_device_name", None)
    if ask is None:
        return accelerator.name
    try:
        return str(ask()) or accelerator.name
    except (RuntimeError, AssertionError, NotImplementedError):
        return accelerator.name


@functools.cache
def cpu_model() -> str:
    """The model of the host's processor as the operating system calls it, or at least its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "cpu model", "Processor") and value.strip():
                return value.strip()
    except OSError:  # no Linux
        pass
    return platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """Logical cores of the machine, however few of them this process may use.

    The whole machine's, because a launcher that binds ranks to cores changes what a process may use.
    """
    return os.cpu_count() or 1
