"""What cannot be copied right is refused here, before anything is written."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .errors import InferenceTensorError, InvalidTensorError, NotATensorError, UnsupportedDtypeError


def validate(destination: Tensor, source: Tensor) -> bool:
    """Checks one copy; returns whether there is anything to do.

    Cheap: looks at metadata alone, except where two views interleave in the same memory.

    Returns:
        False for no elements, and for source and destination being the very same memory.

    Raises:
        NotATensorError: One side is not a ``torch.Tensor``.
        InvalidTensorError: Shapes differ; a side is meta, sparse, nested or quantized; a storage is
            smaller than its tensor says; elements of the destination share memory; the two sides
            overlap in part.
        UnsupportedDtypeError: The dtypes differ and are not both real floating point, or torch has
            no copy between them.
    """
    for role, tensor in (("destination", destination), ("source", source)):
        if not isinstance(tensor, Tensor):
            raise NotATensorError(
                f"the {role} must be a torch.Tensor, not {type(tensor).__name__} "
                f"(destination: {describe(destination)}; source: {describe(source)})"
            )
    for role, tensor in (("destination", destination), ("source", source)):
        problem = _problem(tensor)
        if problem:
            raise _invalid(f"the {role} {problem}", destination, source)
    if destination.shape != source.shape:
        raise _invalid("the shapes differ, and nothing is broadcast", destination, source)
    if destination.dtype != source.dtype and not _torch_casts(destination.dtype, source.dtype):
        raise UnsupportedDtypeError(
            f"no faithful copy from {source.dtype} to {destination.dtype}: both must be real floating-point "
            f"dtypes that torch casts, or the same (destination: {describe(destination)}; source: {describe(source)})"
        )
    if destination.is_inference() and not torch.is_inference_mode_enabled():
        raise InferenceTensorError(
            "the destination was made under torch.inference_mode() and cannot be updated outside it "
            f"(destination: {describe(destination)}; source: {describe(source)})"
        )
    if destination.numel() == 0:
        return False
    if _has_inner_overlap(destination):
        raise _invalid("elements of the destination share memory", destination, source)
    if _is_same_view(destination, source):
        return False
    if _overlap(destination, source):
        raise _invalid("destination and source overlap in part", destination, source)
    return True


def describe(tensor: object) -> str:
    """``torch.bfloat16 (3, 4) on cuda:0``, for messages."""
    if not isinstance(tensor, Tensor):
        return repr(tensor)[:60]
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _invalid(problem: str, destination: Tensor, source: Tensor) -> InvalidTensorError:
    return InvalidTensorError(f"{problem} (destination: {describe(destination)}; source: {describe(source)})")


def _problem(tensor: Tensor) -> str | None:
    if tensor.is_meta:
        return "is a meta tensor, without memory"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"has layout {tensor.layout}, not a dense one"
    if tensor.is_quantized:
        return "is quantized"
    if tensor.numel() == 0:
        return None
    needed = (tensor.storage_offset() + _span(tensor)) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    return f"needs {needed} bytes of storage but has {held}" if needed > held else None


@functools.cache
def _torch_casts(destination: torch.dtype, source: torch.dtype) -> bool:
    if not (destination.is_floating_point and source.is_floating_point):
        return False
    try:
        torch.empty(1, dtype=destination, device="cpu").copy_(torch.zeros(1, dtype=source, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last one in memory, both included; the tensor has some."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _has_inner_overlap(tensor: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return stride == 0 or int(_occupied(tensor).sum()) != tensor.numel()
        reach += (size - 1) * stride
    return False


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.is_neg() == b.is_neg()
        and a.is_conj() == b.is_conj()
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device:
        return False
    first, second = sorted((a, b), key=Tensor.data_ptr)
    gap_bytes = second.data_ptr() - first.data_ptr()
    if gap_bytes >= _span(first) * first.element_size():
        return False
    if a.is_contiguous() or b.is_contiguous() or a.element_size() != b.element_size() or gap_bytes % a.element_size():
        return True
    # Two interleaving views, such as x[::2] and x[1::2]: the only case that needs a look at elements.
    gap = gap_bytes // a.element_size()
    length = max(_span(first), gap + _span(second))
    return bool((_occupied(first, length) & _occupied(second, length, gap)).any())


def _occupied(tensor: Tensor, length: int | None = None, offset: int = 0) -> Tensor:
    """Which of ``length`` elements of memory the tensor uses, starting at ``offset``."""
    mask = torch.zeros(length or _span(tensor), dtype=torch.bool, device="cpu")
    # Written through indices, because torch refuses in-place writes to views that overlap themselves.
    indices = torch.arange(mask.numel(), device="cpu").as_strided(tensor.shape, tensor.stride(), offset)
    mask[indices.reshape(-1)] = True
    return mask
