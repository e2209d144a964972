"""Tools of tests of accelerators and strategies: skips, and what memory holds."""

from __future__ import annotations

import pytest
from torch import Tensor

from ..errors import AcceleratorUnavailableError
from ..overlap import bytes_of
from ..protocol import Accelerator
from ..registry import get_accelerator


def unavailable_reason(name: str) -> str | None:
    """Why the accelerator registered as ``name`` cannot be used here, as one sentence, or None.

    Raises:
        AcceleratorError: The name is unknown or the registration is wrong, which no test should skip.
    """
    try:
        return get_accelerator(name).unavailable_reason()
    except AcceleratorUnavailableError as error:
        return str(error)


def accelerator_or_skip(name: str, config: pytest.Config) -> Accelerator:
    """The accelerator, or a skip with its reason; a failure under ``--require-accelerator=name``."""
    reason = unavailable_reason(name)
    if reason is None:
        return get_accelerator(name)
    if name in config.getoption("--require-accelerator"):
        pytest.fail(f"--require-accelerator={name}: {reason}", pytrace=False)
    pytest.skip(reason)


def skip_without(accelerator: Accelerator, *capabilities: str) -> None:
    """Skips the running test, with the accelerator's own sentence, where a capability is missing."""
    reason = accelerator.capabilities.why_not(*capabilities)
    if reason is not None:
        pytest.skip(reason)


def fetch(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    """A host copy of what ``tensor`` holds once the device has finished everything."""
    accelerator.synchronize(tensor.device.index)
    return tensor.detach().cpu().clone()


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, element after element, so that NaN and signed zeros compare."""
    return bytes_of(tensor.cpu().contiguous())
