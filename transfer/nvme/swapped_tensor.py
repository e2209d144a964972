"""``SwappedTensor``: a handle to values that live in a file."""

from __future__ import annotations

import errno
import math
import operator
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from ..errors import SwapCorruptedError, UnsupportedDtypeError
from .checksums import Checksums
from .file_format import is_swap_file, read_header
from .open_file import check_size, opened
from .swap_directory import OwnedFile, absolute


@dataclass(frozen=True)
class SwappedTensor:
    """Values in a file, which any transfer takes in place of a tensor in host memory.

    ``swap_out`` returns a handle that owns its file: the file is deleted with the last reference to the
    handle, by ``delete``, and when the process ends. ``from_file`` returns one that owns nothing, for a file of
    another program. A pickled handle works in another process while the file exists, and owns nothing.

    Attributes:
        path: The file.
        dtype: Of the values.
        shape: Of the values, which lie in C order without gaps, in this machine's byte order.
        offset_bytes: Where in the file they begin.
        checksums: Of a file of ``swap_out``, unless it was written without.
        stamp: The random stamp of a file of ``swap_out``, which tells it from a file that took its place.
    """

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    offset_bytes: int = 0
    checksums: Checksums | None = field(default=None, repr=False, compare=False)
    stamp: str | None = field(default=None, repr=False)
    _owned: OwnedFile | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], dtype: torch.dtype, shape: tuple[int, ...] | int, offset_bytes: int = 0
    ) -> SwappedTensor:
        """Points at a file that another program wrote, such as DeepSpeed's ``.swp`` files.

        Nothing in such a file says what it holds, so dtype, shape and offset are trusted. Its length is checked now
        and at each read.

        Args:
            path: An existing file. It may be longer than the values.
            dtype: Of the values.
            shape: Of the values, or their number.
            offset_bytes: Where they begin.

        Raises:
            SwapFileNotFoundError: There is no such file.
            SwapError: It cannot be opened, or is not a regular file.
            SwapCorruptedError: It is too short, or is a file of ``swap_out`` whose header these values would
                include.
            UnsupportedDtypeError: ``dtype`` is not a torch dtype with plain values.
            ValueError: The shape or the offset is negative.
        """
        check_dtype(dtype)
        offset_bytes = operator.index(offset_bytes)
        try:
            sizes = torch.Size((shape,) if isinstance(shape, int) else shape)
        except TypeError as error:
            raise TypeError(f"shape must be whole numbers, or one of them, and not {shape!r}") from error
        if offset_bytes < 0 or any(size < 0 for size in sizes):
            raise ValueError(f"shape {tuple(sizes)} and offset_bytes {offset_bytes} must not be negative")
        swapped = cls(absolute(path), dtype, sizes, offset_bytes)
        with opened(swapped.path) as descriptor:
            if is_swap_file(descriptor) and offset_bytes < read_header(descriptor, swapped.path).offset_bytes:
                raise SwapCorruptedError(
                    errno.EBADMSG,
                    "the file begins with a header of `transfer.nvme.swap_out`, not with values: use the handle that "
                    "swap_out returned, or its offset_bytes",
                    str(swapped.path),
                )
            check_size(descriptor, swapped.path, offset_bytes, swapped.nbytes)
        return swapped

    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.numel() * self.dtype.itemsize

    def delete(self) -> None:
        """Deletes the file if it belongs to this handle; another file stays. Idempotent.

        Raises:
            SwapError: The file cannot be deleted.
        """
        if self._owned is not None:
            self._owned.delete()

    # Copies within a process are the handle itself: the file stays as long as one of them.
    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.dtype, self.shape, self.offset_bytes, self.checksums, self.stamp)


def check_dtype(dtype: object) -> None:
    """Checks that values of ``dtype`` can lie in a file.

    Raises:
        UnsupportedDtypeError: ``dtype`` is not a torch dtype, or has no plain values.
    """
    name = str(dtype).removeprefix("torch.")
    # Quantized; bits without a meaning; and u?int1 to 7, which torch has no copy of.
    if not isinstance(dtype, torch.dtype) or re.match(r"q|bits|u?int[1-7]$", name):
        raise UnsupportedDtypeError(
            f"{dtype!r} is not a torch dtype whose values can lie in a file, such as torch.float32"
        )
