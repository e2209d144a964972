"""The patches of a backward pass: gradients go to the host once.

They change where DeepSpeed's code reads and writes, and not what it does: see ``gradients``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from . import stage3
from .attachments import attachments
from .gradients import HostGradients
from .patching import Patch


def _within(block: Callable[..., AbstractContextManager[None]]) -> Patch:
    """A patch with which a method runs in a block of the optimizer's gradients, where these go once.

    Args:
        block: Gets the gradients and the method's arguments.
    """

    def patch(original: Callable[..., Any]) -> Callable[..., Any]:
        def patched(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            attachment = attachments.get(optimizer)
            gradients = None if attachment is None else attachment.gradients
            with contextlib.nullcontext() if gradients is None else block(gradients, *args, **kwargs):
                return original(optimizer, *args, **kwargs)

        return patched

    return patch


PATCHES: dict[str, Patch] = {
    stage3.PARTITION_GRADS: _within(HostGradients.reducing),
    stage3.FINALIZE: _within(lambda gradients, *_args, **_kwargs: gradients.finalizing()),
    stage3.HAS_OVERFLOW: _within(lambda gradients, *_args, **_kwargs: gradients.judging()),
}
