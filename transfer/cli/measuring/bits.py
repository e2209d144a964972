"""Values that show every kind of wrong cast, and comparisons that see every bit."""

from __future__ import annotations

import torch
from torch import Tensor

from accelerators.overlap import bytes_of

#: Zeros of both signs, infinities, ties of bf16 and fp16 rounding, overflows and subnormals of both.
_EDGES = (
    *(0.0, -0.0, float("inf"), -float("inf")),
    *(1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11),
    *(65519.0, 65520.0, -65520.0, 3.4e38, -3.4e38),
    *(2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-133, 2.0**-134, 3 * 2.0**-134, 2.0**-149),
)


def source_values(elements: int) -> Tensor:
    """An fp32 master partition on the host: normal values, with edge cases at both ends. Holds no NaN."""
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor(_EDGES)[:elements]
    values[: edges.numel()] = edges
    values[elements - edges.numel() :] = edges.flip(0)
    return values


def poison(destination: Tensor) -> None:
    """Fills a contiguous tensor with a NaN that no right copy of ``source_values`` leaves there."""
    bytes_of(destination).fill_(0xFF)


def same_bits(found: Tensor, expected: Tensor, chunk_elements: int = 2**24) -> bool:
    """Whether a flat tensor has every bit of another one on the host, which is cast to its dtype chunk by chunk.

    Bits, unlike values, tell the two zeros apart and find equal NaNs equal.
    """
    if found.shape != expected.shape:
        return False
    pairs = zip(
        torch.split(found.detach(), chunk_elements), torch.split(expected.detach(), chunk_elements), strict=True
    )
    return all(
        torch.equal(bytes_of(piece.cpu().contiguous()), bytes_of(wanted.to(found.dtype).contiguous()))
        for piece, wanted in pairs
    )
