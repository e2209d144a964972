"""A checksum for each block of a file's values: XXH3 of 64 bits, which costs less than reading them.

XXH3 (Y. Collet, github.com/Cyan4973/xxHash) is no protection against somebody who wants to deceive; it
notices what drives, cables and programs do to bytes by accident.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

#: Bytes of values under one checksum. Reads are multiples of it, as nothing is used before it was checked;
#: smaller ones cost more, for what Python does around each.
BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Checksums:
    """The checksums of one file's values.

    Attributes:
        block_bytes: Bytes under each; the last block may be short.
        table: Eight bytes a block, little-endian.
    """

    block_bytes: int
    table: bytes

    @classmethod
    def of(cls, block_bytes: int, values: Sequence[int]) -> Checksums:
        """From the checksum of each block, in order."""
        return cls(block_bytes, struct.pack(f"<{len(values)}Q", *values))

    def match(self, offset_bytes: int, block: memoryview) -> bool:
        """Whether a block has the checksum that it was written with.

        Args:
            offset_bytes: Where it begins, counted from the first value; a multiple of ``block_bytes``.
            block: All of it; the last one ends with the last value.
        """
        (expected,) = struct.unpack_from("<Q", self.table, offset_bytes // self.block_bytes * 8)
        return xxhash.xxh3_64_intdigest(block) == expected


def checksums_of(memory: memoryview, block_bytes: int) -> list[int]:
    """The checksum of each block."""
    blocks = range(0, len(memory), block_bytes)
    return [xxhash.xxh3_64_intdigest(memory[begin : begin + block_bytes]) for begin in blocks]
