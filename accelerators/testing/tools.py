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


def check_values(got: Tensor, expected: Tensor, what: str) -> None:
    """Compares two tensors bit for bit.

    Args:
        got: What was found.
        expected: What should be there: of the same shape and dtype.
        what: What is compared, as the beginning of a sentence.

    Raises:
        AssertionError: They differ. One line says where first, what was found and expected there, and how many differ.
    """
    __tracebackhide__ = True
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        sides = (f"{each.dtype} {tuple(each.shape)}" for each in (got, expected))
        raise AssertionError("{}: found {}, expected {}".format(what, *sides))
    wrong = (bits(got) != bits(expected)).view(got.numel(), got.element_size()).any(1).nonzero().flatten()
    if wrong.numel():
        first = int(wrong[0])
        found, right = (_value_at(each, first) for each in (got, expected))
        raise AssertionError(
            f"{what}: element {first} is {found}, not {right}; {wrong.numel()} of {got.numel()} differ"
        )


def _value_at(tensor: Tensor, index: int) -> str:
    """One element, with its bits: NaNs and signed zeros look alike."""
    element = tensor.flatten()[index]
    return f"{element.item()} (0x{bytes(reversed(bits(element).tolist())).hex()})"
