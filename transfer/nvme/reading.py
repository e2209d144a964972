"""Reads values from their file into a host tensor: ``swap_in`` all of them, ``read_range`` a few."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..errors import NotATensorError
from .aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of, round_up
from .checksums import CHECKSUM_BYTES
from .open_swapped import open_swapped
from .read_ahead import reading
from .swapped_tensor import SwappedTensor


def swap_in(swapped: SwappedTensor, *, checksums: bool = True, threads: int = 12) -> Tensor:
    """Reads values back. Blocks until they are in memory, and were checked.

    Args:
        swapped: The handle. Its file stays.
        checksums: Whether to compare those that the file was written with.
        threads: How many read at once.

    Returns:
        A contiguous host tensor of the handle's shape and dtype.

    Raises:
        NotATensorError: ``swapped`` is not a ``SwappedTensor``.
        SwapFileNotFoundError: The file does not exist any more.
        SwapCorruptedError: The file is too short, was replaced, or its bytes have changed.
        SwapError: The file cannot be read.
        ValueError: ``threads`` is not positive.
    """
    if not isinstance(swapped, SwappedTensor):
        raise NotATensorError(
            f"swap_in takes a SwappedTensor, not {type(swapped).__name__}; SwappedTensor.from_file makes one for a file"
        )
    if threads < 1:
        raise ValueError(f"threads ({threads}) must be at least 1")
    if swapped.numel() == 0:
        return torch.empty(swapped.shape, dtype=swapped.dtype, device="cpu")
    skip = swapped.offset_bytes % ALIGNMENT_BYTES
    capacity = round_up(skip + swapped.nbytes, ALIGNMENT_BYTES) + ALIGNMENT_BYTES
    if swapped.checksums is not None and checksums:
        capacity = round_up(capacity, swapped.checksums.checksum_bytes)
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="h2d-read") as pool,
        reading(
            swapped,
            pool,
            capacity=capacity,
            threads=threads,
            request_bytes=CHECKSUM_BYTES,
            checked=checksums,
        ) as (ahead, chunks),
    ):
        (chunk,) = chunks
        memory = aligned_empty(capacity)  # once the file is known to be so long
        ahead.start(chunk, buffer_of(memory))()
    with torch.inference_mode(False):  # so that it can be changed outside it
        return memory.narrow(0, chunk.skip, chunk.num_bytes).view(swapped.dtype).view(swapped.shape)


def read_range(swapped: SwappedTensor, first: int, length: int) -> Tensor:
    """Reads some of the values through the page cache, without a look at checksums, which cover more. Blocks.

    Args:
        swapped: The handle.
        first: Index of the first value, in logical order.
        length: How many.

    Returns:
        A flat host tensor of the handle's dtype.

    Raises:
        SwapError: As ``swap_in``.
    """
    memory = torch.empty(length * swapped.element_size(), dtype=torch.uint8, device="cpu")
    with open_swapped(swapped, direct=False) as file:
        file.read(swapped.offset_bytes + first * swapped.element_size(), buffer_of(memory), memory.numel())
    return memory.view(swapped.dtype)
