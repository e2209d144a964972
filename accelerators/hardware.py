"""Names of this machine's hardware, the same in every run: a profile says by them what was measured."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

from .protocol import Accelerator


def device_name(accelerator: Accelerator) -> str:
    """The model of the current device, such as ``NVIDIA H200``; the accelerator's own name where none is known.

    Asks torch's runtime of the accelerator's name (``torch.cuda``, ``torch.xpu``, ``torch.npu``, ...), if there is
    one. Never raises where the device cannot be asked.
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
