"""``swap_out``: writes values to a file, whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch import Tensor

from accelerators.overlap import bytes_of

from ..errors import InvalidTensorError, NotATensorError
from ..tensor_memory import describe, storage_problem
from .aligned_memory import ALIGNMENT_BYTES, aligned_empty, round_up
from .checksums import CHECKSUM_BYTES, Checksums, checksums_of
from .file_format import Header
from .new_file import created, not_written
from .open_file import NOT_DIRECT
from .swap_directory import OwnedFile, swap_directory
from .swapped_tensor import SwappedTensor, check_dtype
from .threads import run_on


def swap_out(
    tensor: Tensor,
    directory: str | os.PathLike[str],
    name: str | None = None,
    *,
    checksums: bool = True,
    threads: int = 12,
    checksum_bytes: int = CHECKSUM_BYTES,
) -> SwappedTensor:
    """Writes values to a file of their own. Blocks until they are on the drive, and synced.

    The space is taken first, so a full drive is an error before anything is written. The file gets its name when it
    is whole. After an error there is no file, and files written before are unchanged.

    Args:
        tensor: Any dense tensor of plain values, of any strides; one that is not contiguous, or not in host
            memory, is copied as a whole first.
        directory: The root of swap files; made if it is missing. Each process has its own directory in it (mode 0700),
            which is deleted with the process.
        name: Becomes part of the file's name. Any text; two calls with the same text make two files.
        checksums: Whether checksums are written, by which reads notice changed bytes.
        threads: Threads that write at once. Each takes 4 MiB of memory.
        checksum_bytes: Bytes of values under each checksum: a multiple of 4096.

    Returns:
        The handle that owns the file: see ``SwappedTensor``.

    Raises:
        SwapSpaceError: There is no room, or the process's limit of file sizes is lower.
        SwapError: The directory or file cannot be written; the subclass says why.
        NotATensorError: ``tensor`` is not a ``torch.Tensor``.
        InvalidTensorError: The tensor has no plain memory of its own: DTensors and other wrappers, meta, sparse,
            nested, quantized.
        UnsupportedDtypeError: Its dtype has no plain values.
        ValueError: ``threads`` is less than 1, or ``checksum_bytes`` is not a multiple of 4096.
    """
    _check(tensor, threads, checksum_bytes)
    own = swap_directory(directory)
    header = Header.new(tensor.dtype, tensor.shape, checksum_bytes if checksums else 0)
    path = own.new_path(name)
    owned = None
    sums = None
    if tensor.numel() > 0:
        sums = _write(tensor.detach(), path, header, threads)
        owned = OwnedFile(path, own)
    return SwappedTensor(path, tensor.dtype, tensor.shape, header.offset_bytes, sums, header.stamp, owned)


def _check(tensor: Tensor, threads: int, checksum_bytes: int) -> None:
    if not isinstance(tensor, Tensor):
        raise NotATensorError(f"swap_out takes a torch.Tensor, not {type(tensor).__name__}")
    problem = storage_problem(tensor)
    if problem is not None:
        raise InvalidTensorError(f"the tensor {problem} ({describe(tensor)})")
    check_dtype(tensor.dtype)
    if threads < 1 or checksum_bytes < ALIGNMENT_BYTES or checksum_bytes % ALIGNMENT_BYTES:
        raise ValueError(
            f"threads ({threads}) must be at least 1, checksum_bytes ({checksum_bytes}) a multiple of {ALIGNMENT_BYTES}"
        )


def _write(tensor: Tensor, path: Path, header: Header, threads: int) -> Checksums | None:
    part = path.with_suffix(".part")
    try:
        with created(part, header.file_bytes) as (descriptor, direct):
            values = _Values(tensor, header, descriptor, direct)
            begins = range(0, header.value_bytes, values.request_bytes)
            with ThreadPoolExecutor(min(threads, len(begins)), thread_name_prefix="h2d-write") as pool:
                try:
                    writing = [run_on(pool, partial(values.write, begin)) for begin in begins]
                    found = [future.result() for future in writing]
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            values_sums = list(itertools.chain.from_iterable(found))
            sums = Checksums.of(header.checksum_bytes, values_sums) if header.checksum_bytes else None
            _write_whole(descriptor, memoryview(header.packed(sums)), 0)
            os.fsync(descriptor)
        part.rename(path)
        _sync_directory(path.parent)
    except BaseException as error:
        for each in (part, path):
            with contextlib.suppress(OSError):
                each.unlink()
        if isinstance(error, OSError):
            what = f"{header.file_bytes} bytes cannot be swapped out"
            raise not_written(error, what, path, header.file_bytes) from error
        raise
    return sums


class _Values:
    """The values of a tensor on their way into a file, request by request. Threads may share one object.

    Attributes:
        request_bytes: The most that one call of ``write`` writes; whole checksums.
    """

    def __init__(self, tensor: Tensor, header: Header, descriptor: int, direct: int | None) -> None:
        host = tensor if tensor.device.type == "cpu" else tensor.cpu()
        plain = host.resolve_conj().resolve_neg().contiguous()
        # numpy's copies stay in the thread that makes them, where each of torch's would start threads of its own.
        self._bytes = bytes_of(plain).numpy()
        self._header = header
        self._memory = threading.local()
        self._descriptor = descriptor
        self._direct = direct
        self.request_bytes = round_up(CHECKSUM_BYTES, header.checksum_bytes or ALIGNMENT_BYTES)

    def write(self, begin: int) -> list[int]:
        """Writes the values of one request, which begin at byte ``begin``; returns their checksums."""
        length = min(self.request_bytes, len(self._bytes) - begin)
        padded = round_up(length, ALIGNMENT_BYTES)
        memory = self._thread_memory().numpy()
        memory[:length] = self._bytes[begin : begin + length]
        memory[length:padded] = 0
        buffer: memoryview = memory.data
        self._write_all(buffer[:padded], self._header.offset_bytes + begin)
        if not self._header.checksum_bytes:
            return []
        return checksums_of(buffer[:length], self._header.checksum_bytes)

    def _thread_memory(self) -> Tensor:
        memory: Tensor | None = getattr(self._memory, "aligned", None)
        if memory is None:
            memory = self._memory.aligned = aligned_empty(self.request_bytes)
        return memory

    def _write_all(self, buffer: memoryview, offset: int) -> None:
        """Past the page cache where the file system allows it: these bytes are not read from there."""
        direct = self._direct
        if direct is not None:
            try:
                written = os.pwrite(direct, buffer, offset)
                buffer, offset = buffer[written:], offset + written
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                self._direct = None
        _write_whole(self._descriptor, buffer, offset)  # all of it, or what a short write has left


def _write_whole(descriptor: int, buffer: memoryview, offset: int) -> None:
    while buffer:
        written = os.pwrite(descriptor, buffer, offset)
        buffer, offset = buffer[written:], offset + written


def _sync_directory(path: Path) -> None:
    """Makes the new name durable; a system that cannot open directories syncs them by itself."""
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
