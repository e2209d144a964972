"""The memory of tensors: whether they have any, what they span of it, what they share; and ranges of addresses."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

ValueT = TypeVar("ValueT")

#: The ``__torch_dispatch__`` of every class whose tensors are their memory. Another one decides what its tensors hold.
_NO_DISPATCH = Tensor.__torch_dispatch__


def kind_problem(tensor: Tensor) -> str | None:
    """Why tensors of this class are not memory of their own, as the end of a sentence, or None if they may be.

    DTensors, other wrapper subclasses and fake tensors are not. A subclass that leaves ``__torch_dispatch__`` alone, as
    ``Parameter`` does, is.
    """
    kind = type(tensor)
    if kind is Tensor:
        return None
    if is_lazy(tensor):
        return "is an uninitialised parameter, without memory"
    if kind.__torch_dispatch__ is _NO_DISPATCH:
        return None
    inside = "its local shard, `to_local()`" if hasattr(kind, "to_local") else "the plain tensors inside it"
    return f"is a {kind.__name__}, which has no memory of its own: take {inside} instead"


def memory_problem(tensor: Tensor) -> str | None:
    """Why a tensor is not the values in memory of its own, as the end of a sentence, or None if it is.

    Asked before anything goes by ``data_ptr()``, which is 0 for some tensors and raises for others: those of
    ``kind_problem``, and functional tensors, tensors inside ``vmap``, meta tensors, freed storages.
    """
    problem = kind_problem(tensor)
    if problem is not None:
        return problem
    try:
        has_memory = bool(tensor.data_ptr()) or tensor.numel() == 0
    except RuntimeError as error:
        return f"has no memory of its own: {str(error).partition(chr(10))[0]}"
    return None if has_memory else "has no memory of its own"


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


def address(tensor: Tensor) -> int:
    """Where the first element is.

    Raises:
        ValueError: It has elements, and no memory of its own (``memory_problem``).
    """
    problem = memory_problem(tensor)
    if problem is not None:
        raise ValueError(f"a tensor {problem}")
    return tensor.data_ptr()


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device share any byte of an element, exactly.

    Metadata is enough, unless strides interleave; that takes a byte of host memory for each element
    spanned.

    Raises:
        ValueError: One of them has no memory of its own.
    """
    (begin, first), (later, second) = sorted(((address(a), a), (address(b), b)), key=lambda each: each[0])
    gap_bytes = later - begin
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


class AddressRanges(Generic[ValueT]):
    """A set of ranges that share no byte, each with a value.

    Changes need a lock of the caller's. ``covering`` needs none: a look-up beside a change finds the range or not.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []  # sorted
        self._ranges: dict[int, tuple[int, ValueT]] = {}  # by begin: size and value
        #: The sum of the sizes.
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, begin: int, num_bytes: int, value: ValueT) -> None:
        """Adds a range, which must overlap no other."""
        self._ranges[begin] = num_bytes, value
        insort(self._begins, begin)
        self.total_bytes += num_bytes

    def remove(self, begin: int) -> bool:
        """Whether a range began at exactly this address; it is gone now."""
        if begin not in self._ranges:
            return False
        del self._begins[bisect_left(self._begins, begin)]
        self.total_bytes -= self._ranges.pop(begin)[0]
        return True

    def size_at(self, begin: int) -> int | None:
        """The size of the range that begins at exactly this address, or None."""
        found = self._ranges.get(begin)
        return None if found is None else found[0]

    def covering(self, begin: int, num_bytes: int) -> ValueT | None:
        """The value of the range that holds all of these bytes, or None."""
        index = bisect_right(self._begins, begin)
        for start in self._begins[max(index - 1, 0) : index]:  # one, or none
            found = self._ranges.get(start)
            if found is not None and begin + num_bytes <= start + found[0]:
                return found[1]
        return None

    def overlapping(self, begin: int, num_bytes: int) -> list[ValueT]:
        """The values of all ranges that share a byte with this one."""
        first = max(bisect_right(self._begins, begin) - 1, 0)
        starts = self._begins[first : bisect_left(self._begins, begin + num_bytes)]
        return [self._ranges[start][1] for start in starts if begin < start + self._ranges[start][0]]


def _occupied(tensor: Tensor, unit: int, length: int, offset: int = 0) -> Tensor:
    """Which of ``length`` units of memory, each of ``unit`` bytes, the tensor uses from ``offset`` on."""
    width = tensor.element_size() // unit
    mask = torch.zeros(length, dtype=torch.bool, device="cpu")
    # Dimensions of stride 0 visit the same elements again, which torch refuses to write through a view.
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    sizes, strides = [size for size, _ in dims], [stride * width for _, stride in dims]
    mask.as_strided([*sizes, width], [*strides, 1], offset).fill_(True)
    return mask
