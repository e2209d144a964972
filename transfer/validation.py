"""Checks before a copy: a pair of tensors without one right result is refused."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from accelerators.overlap import overlaps_itself, share_elements

from .errors import InferenceTensorError, InvalidTensorError, NotATensorError, TransferError, UnsupportedDtypeError
from .nvme.swapped_tensor import SwappedTensor
from .tensor_memory import describe, storage_problem


def validate(destination: Tensor, source: Tensor | SwappedTensor) -> bool:
    """Checks one copy; returns whether there is anything to do.

    Looks at metadata alone, except where strides interleave in the same memory; that needs a byte of
    host memory for each element spanned.

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
    if _is_plain(destination, source):
        return True
    for role, tensor, allowed, also in (
        ("destination", destination, Tensor, ""),
        ("source", source, (Tensor, SwappedTensor), " or a transfer.nvme.SwappedTensor"),
    ):
        if not isinstance(tensor, allowed):
            problem = f"the {role} must be a torch.Tensor{also}, not {type(tensor).__name__}"
            raise _invalid(problem, destination, source, NotATensorError)
    try:
        return _validate(destination, source)
    except TransferError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        # Tensors that raise when asked about their memory: uninitialised, fake, inside vmap, ...
        raise _invalid(f"a side has no memory of its own to copy: {error}", destination, source) from error


def with_plain_signs(destination: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The same copy between tensors whose memory has the values with their signs.

    On the host, torch drops the sign of a contiguous negative view that it casts between fp32 and fp16, on either side.
    Such views are rare: imaginary parts of conjugates. The source's values are made anew then.
    """
    if destination.is_neg():
        destination, source = torch._neg_view(destination), source.neg()
    return destination, source.resolve_neg() if source.is_neg() else source


def _is_plain(destination: Any, source: Any) -> bool:
    """Whether this is the common case: two contiguous, plain tensors apart from each other. A few microseconds."""
    try:
        if not (type(destination) is type(source) is Tensor and destination.shape == source.shape):
            return False
        begins = []
        for tensor in (destination, source):
            address, size = tensor.data_ptr(), tensor.nbytes
            storage = tensor.untyped_storage()
            if (
                not address
                or not size
                or tensor.layout is not torch.strided
                or not tensor.is_contiguous()
                or address + size > storage.data_ptr() + storage.nbytes()
                or tensor.is_nested
                or tensor.is_quantized
                or tensor.is_inference()
            ):
                return False
            begins.append((address, address + size))
    except (RuntimeError, NotImplementedError):  # such tensors have no memory, or no strides
        return False
    (begin, end), (other_begin, other_end) = begins
    apart = end <= other_begin or other_end <= begin or destination.device != source.device
    return apart and _torch_copies(destination.dtype, source.dtype)


def _validate(destination: Tensor, source: Tensor | SwappedTensor) -> bool:
    for role, tensor in (("destination", destination), ("source", source)):
        problem = storage_problem(tensor) if isinstance(tensor, Tensor) else None
        if problem:
            raise _invalid(f"the {role} {problem}", destination, source)
    if destination.shape != source.shape:
        raise _invalid("the shapes differ, and nothing is broadcast", destination, source)
    if not _torch_copies(destination.dtype, source.dtype):
        casts = "both must be real floating-point dtypes that torch casts, or the same"
        problem = f"no faithful copy from {source.dtype} to {destination.dtype}: {casts}"
        raise _invalid(problem, destination, source, UnsupportedDtypeError)
    if destination.is_inference() and not torch.is_inference_mode_enabled():
        problem = "the destination was made under torch.inference_mode() and cannot be updated outside it"
        raise _invalid(problem, destination, source, InferenceTensorError)
    if destination.numel() == 0:
        return False
    if overlaps_itself(destination):
        raise _invalid("elements of the destination share memory", destination, source)
    if not isinstance(source, Tensor):  # in a file, where nothing overlaps
        if destination.is_neg():
            raise _invalid("the destination is a negative view, which takes no values of a file", destination, source)
        return True
    if _is_same_view(destination, source):
        return False
    if destination.device == source.device and share_elements(destination, source):
        raise _invalid("destination and source overlap in part", destination, source)
    return True


def _invalid(
    problem: str, destination: object, source: object, kind: type[TransferError] = InvalidTensorError
) -> TransferError:
    """The error that names both sides."""
    return kind(f"{problem} (destination: {describe(destination)}; source: {describe(source)})")


@functools.cache
def _torch_copies(destination: torch.dtype, source: torch.dtype) -> bool:
    if destination != source and not (destination.is_floating_point and source.is_floating_point):
        return False
    try:
        torch.empty(1, dtype=destination, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except RuntimeError:
        return False
    return True


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.dtype == b.dtype
        and _strides(a) == _strides(b)
        and a.is_neg() == b.is_neg()
        and a.is_conj() == b.is_conj()
    )


def _strides(tensor: Tensor) -> list[int]:
    """The strides that matter: not those of dimensions of size 1."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
