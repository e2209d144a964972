"""The section ``nvme_swapped`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from typing_extensions import Self

from ..nvme.aligned_memory import ALIGNMENT_BYTES, round_up
from ..schema.fields import (
    BufferCount,
    Checked,
    Directory,
    Elements,
    Flag,
    ThreadCount,
    one_of,
    parse_size,
    refuse,
)
from ..schema.model import StrategyConfig

#: One casts on the device while the other fills.
SLOTS = 2


def _reader(value: Any) -> str:
    if value == "aio":
        raise refuse(
            "DeepSpeed's op reports reads that failed as done, and was slower wherever both were measured; leave the "
            "key out: files are read by the system's preadv"
        )
    if value != "posix":
        raise refuse("expected posix, which is the default")
    return "posix"


def _request_bytes(value: Any) -> int:
    size = parse_size(value)
    if size < ALIGNMENT_BYTES or size % ALIGNMENT_BYTES:
        raise refuse(f"expected a multiple of {ALIGNMENT_BYTES} bytes")
    return size


#: Where values are cast.
Cast = Annotated[str, one_of("device", "host")]
#: What reads files; ``posix`` is the only one.
Reader = Annotated[str, Checked(_reader, {"const": "posix"})]
#: A size in bytes that is a multiple of 4096.
RequestBytes = Annotated[
    int,
    Checked(
        _request_bytes,
        {"anyOf": [{"type": "integer", "minimum": ALIGNMENT_BYTES, "multipleOf": ALIGNMENT_BYTES}, {"type": "string"}]},
    ),
]


class NvmeSwappedConfig(StrategyConfig):
    """The section ``nvme_swapped``.

    Attributes:
        path: The directory that ``NvmeSwappedTransfer.swap_out`` writes to. Reading needs none.
        chunk_elements: fp32 elements in each buffer. At any time one chunk is copied, one is cast, and others are read.
        buffers: Number of buffers.
        cast: Where the values are cast: ``device`` or ``host``.
        pinned: Whether files are read into pinned memory. False: into ordinary memory, which torch copies from.
        reader: ``posix``, the system's ``preadv``; the only one.
        threads: Threads that read at once.
        request_bytes: The most that a thread reads in one call; a multiple of 4096.
        checksums: Whether ``swap_out`` writes checksums, and reading compares those that a file has.
    """

    renamed: ClassVar[Mapping[str, str]] = {"block_bytes": "request_bytes"}

    path: Directory = None
    chunk_elements: Elements = 2**22
    buffers: BufferCount = 8
    cast: Cast = "device"
    pinned: Flag = True
    reader: Reader = "posix"
    threads: ThreadCount = 12
    request_bytes: RequestBytes = 2**22
    checksums: Flag = True

    @property
    def chunk_bytes(self) -> int:
        """Bytes of each buffer."""
        return round_up(self.chunk_elements * 4, ALIGNMENT_BYTES)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory for each device."""
        return self.chunk_bytes * self.buffers

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device memory for each device and source dtype, where the device casts."""
        return self.chunk_bytes * SLOTS

    def simpler(self) -> Self | None:
        if not self.pinned:
            return None
        return self.model_copy(update={"cast": "host"} if self.cast == "device" else {"pinned": False})
