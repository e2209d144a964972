"""The memory that a tensor spans, its bytes, and whether two tensors share elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def span_elements(tensor: Tensor) -> int:
    """Elements from the first to the last one in memory, both included; 0 for none."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def span_bytes(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last one in memory; 0 for none."""
    return span_elements(tensor) * tensor.element_size()


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a flat view.

    By new strides: those of dimensions of size 1 may be any, and a view of another element size looks at them.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device share any byte of an element, exactly.

    Metadata is enough, unless strides interleave; that takes a byte of host memory for each element
    spanned.
    """
    first, second = sorted((a, b), key=Tensor.data_ptr)
    gap_bytes = second.data_ptr() - first.data_ptr()
    if gap_bytes >= span_bytes(first) or not second.numel():
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    unit = math.gcd(gap_bytes, a.element_size(), b.element_size())
    gap = gap_bytes // unit
    length = max(span_bytes(first), gap_bytes + span_bytes(second)) // unit
    return bool((_occupied(first, unit, length) & _occupied(second, unit, length, gap)).any())


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of one tensor share memory, exactly."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            unit, length = tensor.element_size(), span_elements(tensor)
            return stride == 0 or int(_occupied(tensor, unit, length).sum()) != tensor.numel()
        reach += (size - 1) * stride
    return False


def _occupied(tensor: Tensor, unit: int, length: int, offset: int = 0) -> Tensor:
    """Which of ``length`` units of memory, each of ``unit`` bytes, the tensor uses from ``offset`` on."""
    width = tensor.element_size() // unit
    mask = torch.zeros(length, dtype=torch.bool, device="cpu")
    # Dimensions of stride 0 visit the same elements again, which torch refuses to write through a view.
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    sizes, strides = [size for size, _ in dims], [stride * width for _, stride in dims]
    mask.as_strided([*sizes, width], [*strides, 1], offset).fill_(True)
    return mask
