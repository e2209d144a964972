"""Checksums of a file's values, one for each few MiB: XXH3 of 64 bits, which costs less than reading them.

XXH3 (github.com/Cyan4973/xxHash) notices what drives, cables and programs do to bytes by accident. It is
no protection against deceit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

#: Bytes of values under one checksum. Reads are multiples of it, as nothing is used before it was checked.
#: Smaller ones cost more on fast drives, for what Python does around each.
CHECKSUM_BYTES = 2**22


@dataclass(frozen=True)
class Checksums:
    """The checksums of one file's values.

    Attributes:
        checksum_bytes: Bytes of values under each; the last one may cover fewer.
        table: Eight bytes a checksum, little-endian.
    """

    checksum_bytes: int
    table: bytes

    @classmethod
    def of(cls, checksum_bytes: int, values: Sequence[int]) -> Checksums:
        """From the checksums, in order."""
        return cls(checksum_bytes, struct.pack(f"<{len(values)}Q", *values))

    def first_mismatch(self, offset_bytes: int, memory: memoryview) -> int | None:
        """Where the values of the first wrong checksum begin, counted from the first value; None if all are right.

        Args:
            offset_bytes: Where ``memory`` lies, counted from the first value; a multiple of ``checksum_bytes``.
            memory: The values under one checksum or several, as a whole.
        """
        found = checksums_of(memory, self.checksum_bytes)
        expected = struct.unpack_from(f"<{len(found)}Q", self.table, offset_bytes // self.checksum_bytes * 8)
        wrong = (number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        number = next(wrong, None)
        return None if number is None else offset_bytes + number * self.checksum_bytes


def checksums_of(memory: memoryview, checksum_bytes: int) -> list[int]:
    """The checksums of values; the last one may cover fewer bytes."""
    begins = range(0, len(memory), checksum_bytes)
    return [xxhash.xxh3_64_intdigest(memory[begin : begin + checksum_bytes]) for begin in begins]
