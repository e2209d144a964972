"""What was found on the device beside what must be there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelerators.overlap import bytes_of

from ..errors import VerificationError
from ..tensor_memory import describe
from .sampling import Part


def compare(
    parts: Sequence[Part], found: Sequence[Tensor], destination: Tensor, mode: str, seed: int, copy: int
) -> VerificationError | None:
    """The error of a copy that has left wrong elements, or None. Bits must be equal; a NaN may have any payload.

    Args:
        parts: In the order of their elements.
        found: The elements of each part, contiguous.
        destination: For the error, as the others.
        mode: How the parts were chosen.
        seed: What they were chosen with.
        copy: The number of the copy.
    """
    wrong: list[tuple[Part, Tensor, Tensor]] = []
    for part, values in zip(parts, found, strict=True):
        if not torch.equal(bytes_of(part.expected), bytes_of(values)):
            positions = _differing(part.expected, values).nonzero().flatten()
            if positions.numel():
                wrong.append((part, values, positions))
    if not wrong:
        return None
    (part, values, positions), (last_part, _, last_positions) = wrong[0], wrong[-1]
    at = int(positions[0])
    return VerificationError(
        describe(destination),
        part.locate(at),
        last_part.locate(int(last_positions[-1])),
        sum(each.numel() for _, _, each in wrong),
        sum(each.expected.numel() for each in parts),
        _show(part.expected, at),
        _show(values, at),
        mode,
        seed,
        copy,
    )


def _differing(expected: Tensor, found: Tensor) -> Tensor:
    """Which elements differ, flat."""
    parts_of_each = 1
    if expected.is_complex():
        parts_of_each = 2
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    pairs = bytes_of(expected).view(-1, expected.element_size()) != bytes_of(found).view(-1, found.element_size())
    differ = pairs.any(1)
    if expected.is_floating_point():
        differ &= ~(_is_nan(expected) & _is_nan(found))
    return differ.view(-1, parts_of_each).any(1)


def _is_nan(values: Tensor) -> Tensor:
    try:
        return values.double().isnan().view(-1)
    except (RuntimeError, NotImplementedError):  # two values in a byte, of which none is a NaN
        return torch.zeros(values.numel(), dtype=torch.bool, device="cpu")


def _show(values: Tensor, at: int) -> str:
    element = values.reshape(-1)[at : at + 1]
    bits = bytes(bytes_of(element).flip(0).tolist()).hex()
    try:
        return f"{element.item()!r} (0x{bits})"
    except (RuntimeError, NotImplementedError):
        return f"0x{bits}"
