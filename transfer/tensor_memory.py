"""Descriptions of tensors, and refusals of those that are not plain memory of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.overlap import kind_problem, memory_problem, span_elements

from .errors import InvalidTensorError


def describe(tensor: object) -> str:
    """``torch.bfloat16 (3, 4) on cuda:0``, for messages."""
    if not isinstance(tensor, Tensor):
        return repr(tensor)[:200]
    try:
        return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    except RuntimeError:  # nested, uninitialised, ...
        return f"{type(tensor).__name__} without a shape"


def storage_problem(tensor: Tensor) -> str | None:
    """Why this tensor is not dense memory of its own, as the end of a sentence, or None."""
    problem = kind_problem(tensor)
    if problem is not None:
        return problem
    if tensor.is_meta:
        return "is a meta tensor, without memory"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"has layout {tensor.layout}, not a dense one"
    if tensor.is_quantized:
        return "is quantized"
    if tensor.numel() == 0:
        return None
    try:
        needed = (tensor.storage_offset() + span_elements(tensor)) * tensor.element_size()
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:  # inside vmap, sharded, ...: torch's reason is in the answer below
        return memory_problem(tensor)
    return f"needs {needed} bytes of storage but has {held}" if needed > held else memory_problem(tensor)


def pair_problem(destination: object, source: object) -> str | None:
    """Why no copy can be made of these, as a sentence, or None; only a lack of memory is such a reason."""
    try:  # the common case, asked on each copy
        fine = type(destination) is type(source) is Tensor and destination.data_ptr() and source.data_ptr()
    except RuntimeError:
        fine = False
    if fine:
        return None
    for role, tensor in (("destination", destination), ("source", source)):
        problem = memory_problem(tensor) if isinstance(tensor, Tensor) else None
        if problem is not None:
            return f"The {role} {problem}."
    return None


def goes_to_device(accelerator: Accelerator, destination: Tensor, source: object) -> bool:
    """Whether a copy goes from host memory, or from a file, to the accelerator's."""
    return accelerator.on_device(destination) and (not isinstance(source, Tensor) or accelerator.on_host(source))


def check_memory(tensor: object, role: str) -> None:
    """Checks that a tensor is memory of its own; what is not a tensor passes.

    Raises:
        InvalidTensorError: It is a DTensor, or another tensor for which ``memory_problem`` has a reason.
    """
    _refuse(tensor, role, memory_problem)


def check_kind(tensor: object, role: str) -> None:
    """As ``check_memory``, for tensors whose storage may have been freed since.

    Raises:
        InvalidTensorError: It is a DTensor, or another tensor for which ``kind_problem`` has a reason.
    """
    _refuse(tensor, role, kind_problem)


def _refuse(tensor: object, role: str, ask: Callable[[Tensor], str | None]) -> None:
    problem = ask(tensor) if isinstance(tensor, Tensor) else None
    if problem is not None:
        raise InvalidTensorError(f"the {role} {problem} ({describe(tensor)})")
