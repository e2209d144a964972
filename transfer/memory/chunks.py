"""How a copy is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ConfigError


def plan_chunks(numel: int, chunk_elements: int) -> Iterator[tuple[int, int]]:
    """Yields ``(offset, length)`` in elements, in order, covering ``range(numel)`` exactly once.

    Args:
        numel: Elements in all; may pass 2**31.
        chunk_elements: The most elements of one chunk.

    Raises:
        ConfigError: ``chunk_elements`` is not positive.
    """
    if chunk_elements < 1:
        raise ConfigError(f"chunk_elements must be at least 1, not {chunk_elements}")
    for offset in range(0, numel, chunk_elements):
        yield offset, min(chunk_elements, numel - offset)


def paired_chunks(destination: Tensor, source: Tensor, chunk_elements: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields views of both tensors that belong together, each of at most ``chunk_elements``.

    Works for any strides. Two tensors that both have a flat view are cut into equal chunks; others
    along their leading dimensions, where the last chunk of each row may be short.
    """
    flat_destination, flat_source = flat_view(destination), flat_view(source)
    if flat_destination is not None and flat_source is not None:
        # One call for all views: a chunk must cost the host no more than a few microseconds.
        yield from zip(
            torch.split(flat_destination, chunk_elements), torch.split(flat_source, chunk_elements), strict=True
        )
        return
    if destination.numel() <= chunk_elements:
        yield destination, source
        return
    rows = chunk_elements // (destination.numel() // destination.shape[0])
    if rows == 0:
        for index in range(destination.shape[0]):
            yield from paired_chunks(destination[index], source[index], chunk_elements)
        return
    for offset, length in plan_chunks(destination.shape[0], rows):
        yield destination.narrow(0, offset, length), source.narrow(0, offset, length)


def pairs_from(destination: Tensor, first: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields views of ``destination`` from element ``first`` on, each with its part of ``values`` in its shape.

    Args:
        destination: Of any strides.
        first: Index of its first element, in logical order.
        values: Flat.
    """
    offset = 0
    for view in views_of_range(destination, first, first + values.numel()):
        yield view, values.narrow(0, offset, view.numel()).view(view.shape)
        offset += view.numel()


def views_of_range(tensor: Tensor, begin: int, end: int) -> Iterator[Tensor]:
    """Yields views that hold the elements from ``begin`` to ``end``, in logical order: as few as the strides allow."""
    flat = flat_view(tensor)
    if flat is not None:
        yield flat.narrow(0, begin, end - begin)
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # all of it lies within one row
        yield from views_of_range(tensor[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from views_of_range(tensor[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield tensor.narrow(0, first, last - first)
    if last * row < end:
        yield from views_of_range(tensor[last], 0, end - last * row)


def flat_view(tensor: Tensor) -> Tensor | None:
    """A one-dimensional view of the same memory in logical order, or None where strides forbid it."""
    try:
        return tensor.view(-1)
    except RuntimeError:
        return None
