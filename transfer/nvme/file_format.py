"""The format of a file that ``swap_out`` writes: one header, then the values.

======================  ==================================================================================
bytes                   what
======================  ==================================================================================
0 to 7                  ``H2DSWAP`` and a newline
8 to 11, 12 to 15       format version and length of the description, little-endian
then                    the description, as JSON: dtype, shape, offset of the values, ``block_bytes``, stamp
then                    a checksum of eight bytes for each ``block_bytes`` of the values; none if that is 0
then                    eight bytes: the checksum of everything before
the values' offset on   the values, padded with zeros to a multiple of 4096 bytes
======================  ==================================================================================

The values begin at a multiple of 4096 bytes, so that they can be read with O_DIRECT.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from ..errors import SwapCorruptedError
from .aligned_memory import ALIGNMENT_BYTES, round_up
from .checksums import Checksums

MAGIC = b"H2DSWAP\n"
VERSION = 1
_FIXED = struct.Struct("<8sII")
#: Bounds what a header that was not written by us can make us read.
_MAX_DESCRIPTION_BYTES = 2**16
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Header:
    """The description in the header of a file.

    Attributes:
        dtype: Name of the values' dtype, without ``torch.``.
        shape: Of the values.
        offset_bytes: Where the values begin.
        checksum_bytes: Bytes of values under each checksum; 0: without checksums.
        stamp: Random, and so different for each file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    checksum_bytes: Annotated[int, Field(alias="block_bytes")]  # as the format calls it
    stamp: str

    @classmethod
    def new(cls, dtype: torch.dtype, shape: torch.Size, checksum_bytes: int) -> Header:
        """The header of a file to be written, with the room that its checksums will take."""
        name = str(dtype).removeprefix("torch.")
        header = cls(name, tuple(shape), 0, checksum_bytes, secrets.token_hex(8))
        # The description contains the offset: room is left for the longest one.
        longest = replace(header, offset_bytes=2**62)
        room = len(longest._described()) + longest.table_bytes + 8
        return replace(header, offset_bytes=round_up(room, ALIGNMENT_BYTES))

    @property
    def value_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.offset_bytes + round_up(self.value_bytes, ALIGNMENT_BYTES)

    @property
    def table_bytes(self) -> int:
        """Bytes of the checksums."""
        return 8 * -(-self.value_bytes // self.checksum_bytes) if self.checksum_bytes else 0

    def _described(self) -> bytes:
        description = _header.dump_json(self, by_alias=True)
        return _FIXED.pack(MAGIC, VERSION, len(description)) + description

    def packed(self, checksums: Checksums | None) -> bytes:
        """The bytes of the header, as long as ``offset_bytes``."""
        before = self._described() + (b"" if checksums is None else checksums.table)
        return (before + struct.pack("<Q", xxhash.xxh3_64_intdigest(before))).ljust(self.offset_bytes, b"\0")


_header = TypeAdapter(Header)


def is_swap_file(descriptor: int) -> bool:
    """Whether an open file begins as ours do."""
    return _pread(descriptor, len(MAGIC), 0) == MAGIC


def read_header(descriptor: int, path: Path) -> Header:
    """The header of an open file of ours, checked against its own checksum.

    Raises:
        SwapCorruptedError: It is not a file of ``swap_out``, has another version, or is damaged.
    """
    fixed = _pread(descriptor, _FIXED.size, 0)
    if len(fixed) < _FIXED.size or not fixed.startswith(MAGIC):
        raise corrupted(path, "it does not begin as a file of `transfer.nvme.swap_out` does")
    _, version, length = _FIXED.unpack(fixed)
    if version != VERSION:
        raise corrupted(path, f"it has format version {version}, and this package reads version {VERSION}")
    if length > _MAX_DESCRIPTION_BYTES:
        raise corrupted(path, f"its description would be {length} bytes long")
    try:
        header = _header.validate_json(_pread(descriptor, length, _FIXED.size))
        table = header.table_bytes
    except (ValidationError, ValueError, OverflowError) as error:
        raise corrupted(path, "its header is damaged") from error
    before = _FIXED.size + length + table
    size = os.fstat(descriptor).st_size
    if table < 0 or before + 8 > size:
        what = f"its header is damaged, or cut off: it would be {before + 8} bytes long, and the file has {size}"
        raise corrupted(path, what)
    checksum = xxhash.xxh3_64()
    for begin in range(0, before, _PIECE_BYTES):  # a table may be as long as somebody has made the file
        checksum.update(_pread(descriptor, min(_PIECE_BYTES, before - begin), begin))
    if _pread(descriptor, 8, before) != struct.pack("<Q", checksum.intdigest()):
        raise corrupted(path, "its header is damaged: the checksum is another")
    return header


def _pread(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """The bytes, or fewer where the file ends. One call of the system may read fewer than there are."""
    found = b""
    while len(found) < num_bytes:
        more = os.pread(descriptor, num_bytes - len(found), offset + len(found))
        if not more:
            break
        found += more
    return found


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of this name."""
    dtype = vars(torch).get(name)  # `getattr` would import modules of that name
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a torch dtype")
    return dtype


def corrupted(path: Path, what: str) -> SwapCorruptedError:
    """The error for a file that does not hold what was swapped out."""
    remedy = "restore the values from a checkpoint"
    return SwapCorruptedError(errno.EBADMSG, f"the swap file cannot be trusted: {what}; {remedy}", str(path))
