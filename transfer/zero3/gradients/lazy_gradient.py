"""A tensor with the values of a gradient that is in no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .master_gradient import MasterGradient, StepGradient

_aten = torch.ops.aten


class LazyGradient(Tensor):
    """A range of a ``MasterGradient``: a flat tensor of its dtype on the host, without memory.

    Whatever torch does with it sees the right values. What only reads gets them in memory that lives as long as the
    call. Scaling all of it, and setting a range, are noted. Whatever else writes it, or keeps a view of it, makes the
    whole gradient real, once, and DeepSpeed works on that from then on. So no reader is forgotten, and those that are
    known cost no memory.
    """

    owner: MasterGradient | StepGradient
    offset: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own classes do

    @staticmethod
    def __new__(cls, owner: MasterGradient | StepGradient, offset: int, numel: int) -> LazyGradient:
        made = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=owner.dtype, device=torch.device("cpu"))
        made.owner, made.offset = owner, offset
        if hasattr(torch._C, "_set_throw_on_mutable_data_ptr"):  # compiled code that asks for its address gets an error
            torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = _KNOWN.get(function)
        if known is not None and type(args[0]) is cls:
            result = known(*args, **kwargs)
            if result is not None:
                return result
        if function is _aten.copy_.default and _is_buffer_for(args[0], args[1]):
            return args[1].copy_to(args[0])
        # An argument of which something is written or kept, as the function's schema says, needs real memory.
        schema = function._schema.arguments
        by_name = {each.name: each for each in schema}
        positional = [_real(value, each.alias_info is not None) for value, each in zip(args, schema, strict=False)]
        named = {name: _real(value, by_name[name].alias_info is not None) for name, value in kwargs.items()}
        return function(*positional, **named)

    def values(self) -> Tensor:
        """A plain tensor with these values, not to be written. Blocks while they are made."""
        return self.owner.read(self.offset, self.numel())

    def copy_to(self, buffer: Tensor) -> Tensor:
        """Makes the values in a buffer, which has as many elements of the dtype, flat, on the host. Returns it."""
        made = self.owner.read(self.offset, self.numel(), buffer)
        return buffer if made.data_ptr() == buffer.data_ptr() else buffer.copy_(made)

    def hold(self) -> Tensor:
        """This range of the real gradient, which is made for it."""
        return self.owner.hold().narrow(0, self.offset, self.numel())

    def data_ptr(self) -> int:
        return self.hold().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.hold().untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        return self.hold().numpy(force=force)

    def tolist(self) -> Any:
        return self.values().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.values())

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.values().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _is_buffer_for(destination: Any, source: Any) -> bool:
    return (
        type(destination) is Tensor
        and type(source) is LazyGradient
        and destination.device.type == "cpu"
        and (destination.dtype, destination.shape) == (source.dtype, source.shape)
        and destination.is_contiguous()
    )


def _real(argument: Any, keep: bool) -> Any:
    return tree_map_only(LazyGradient, LazyGradient.hold if keep else LazyGradient.values, argument)


def _detach(gradient: LazyGradient) -> LazyGradient:
    return LazyGradient(gradient.owner, gradient.offset, gradient.numel())


def _slice(
    gradient: LazyGradient, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyGradient | None:
    if dim not in (0, -1) or step != 1:
        return None
    begin, stop, _ = slice(start, end).indices(gradient.numel())
    return LazyGradient(gradient.owner, gradient.offset + begin, max(0, stop - begin))


def _scale(gradient: LazyGradient, factor: Any) -> LazyGradient | None:
    is_whole = gradient.numel() == gradient.owner.numel
    is_number = isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.dim() == 0)
    if not is_whole or not is_number:
        return None
    gradient.owner.scale(float(factor))  # exact in Python's: the factor has 64 bits at most
    return gradient


def _copy(gradient: LazyGradient, source: Tensor, non_blocking: bool = False) -> LazyGradient:  # noqa: ARG001
    values = source.expand(gradient.numel()) if source.dim() <= 1 else source
    if values.shape != gradient.shape:
        raise RuntimeError(f"a gradient of {gradient.numel()} elements cannot be set from {tuple(source.shape)}")
    gradient.owner.write(gradient.offset, values)
    return gradient


_KNOWN: dict[Any, Callable[..., LazyGradient | None]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.slice.Tensor: _slice,
    _aten.mul_.Tensor: _scale,
    _aten.mul_.Scalar: _scale,
    _aten.copy_.default: _copy,
}
