"""Descriptions of tensors, and whether one has memory of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from accelerators.overlap import span_elements


def describe(tensor: object) -> str:
    """``torch.bfloat16 (3, 4) on cuda:0``, for messages."""
    if not isinstance(tensor, Tensor):
        return repr(tensor)[:200]
    try:
        return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    except RuntimeError:  # nested, uninitialised, ...
        return f"{type(tensor).__name__} without a shape"


def storage_problem(tensor: Tensor) -> str | None:
    """Why this tensor has no plain memory of its own, as the end of a sentence, or None."""
    if is_lazy(tensor):
        return "is an uninitialised parameter, without memory"
    if tensor.is_meta:
        return "is a meta tensor, without memory"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"has layout {tensor.layout}, not a dense one"
    if tensor.is_quantized:
        return "is quantized"
    if tensor.numel() == 0:
        return None
    needed = (tensor.storage_offset() + span_elements(tensor)) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    return f"needs {needed} bytes of storage but has {held}" if needed > held else None
