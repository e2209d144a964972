"""The patches of a backward pass: gradients go to the host once.

They change where DeepSpeed's code reads and writes, and not what it does: see ``gradients``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from . import stage3
from .attachments import attachments
from .gradients import HostGradients
from .patching import Patch


def _gradients(optimizer: Any) -> HostGradients | None:
    attachment = attachments.get(optimizer)
    return None if attachment is None else attachment.gradients


def reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, parameters: Any, partitions: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = _gradients(optimizer)
        with contextlib.nullcontext() if gradients is None else gradients.reducing(parameters, partitions):
            return original(optimizer, parameters, partitions, *args, **kwargs)

    return patched


def finalize(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = _gradients(optimizer)
        with contextlib.nullcontext() if gradients is None else gradients.finalizing():
            return original(optimizer, *args, **kwargs)

    return patched


def judge(original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = _gradients(optimizer)
        with contextlib.nullcontext() if gradients is None else gradients.judging():
            return original(optimizer, *args, **kwargs)

    return patched


PATCHES: dict[str, Patch] = {
    stage3.PARTITION_GRADS: reduce,
    stage3.FINALIZE: finalize,
    stage3.HAS_OVERFLOW: judge,
}
