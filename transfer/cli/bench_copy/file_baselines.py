"""What ``h2d bench --nvme`` compares with: how fast the file can be read at all, and what DeepSpeed does with it."""

from __future__ import annotations

import contextlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator, deepspeed_aio

from ...errors import StrategyUnavailableError
from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of, round_down, round_up
from ...nvme.open_file import O_DIRECT, opened
from ...nvme.swapped_tensor import SwappedTensor
from ...registry import get_strategy
from ..measuring.baselines import NOTHING, Baseline
from ..measuring.raw_io import in_requests, move_all
from ..measuring.report import plural

#: Names that other figures refer to. The first is followed by how many threads read.
RAW_READ = "raw read"
DEEPSPEED_FROM_NVME = "DeepSpeed from NVMe"


class RawRead(Baseline):
    """The lower bound: threads read the file past the page cache. The bytes go nowhere."""

    summary = "nothing but O_DIRECT reads of the file into host memory, as fio does"
    reads_swapped = True
    copies = False

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype, threads: int, request_bytes: int) -> None:
        super().__init__(accelerator, dtype)
        self._threads = threads
        self._request_bytes = request_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="h2d-bench-read")
        self._memory = NOTHING

    def prepare(self, source: Any) -> None:
        self._memory = aligned_empty(round_up(source.nbytes, ALIGNMENT_BYTES)).zero_()  # no page is new when timed

    def close(self) -> None:
        self._memory = NOTHING
        self._pool.shutdown()
        super().close()

    def _copy(self, destination: Tensor, source: Any) -> None:  # noqa: ARG002 - nothing reaches the device
        buffer = buffer_of(self._memory)
        with opened(source.path, O_DIRECT) as descriptor:

            def move(_thread: int, offset: int, length: int) -> None:
                move_all(os.preadv, descriptor, buffer[offset : offset + length], source.offset_bytes + offset)

            in_requests(self._pool, self._threads, len(buffer), self._request_bytes, move)


class SwapBuffer(Baseline):
    """What needs memory such as DeepSpeed swaps into: locked by its aio op, unknown to the device."""

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype, threads: int) -> None:
        super().__init__(accelerator, dtype)
        self._threads = threads
        self._handles: list[tuple[Any, int]] = []
        self._buffer = NOTHING

    @property
    def pinned_bytes(self) -> int:
        return super().pinned_bytes + self._buffer.nbytes

    def prepare(self, source: Any) -> None:
        num_bytes = round_up(source.nbytes, ALIGNMENT_BYTES)
        obstacle = deepspeed_aio.unavailable_reason()
        if obstacle is None and not deepspeed_aio.may_lock_bytes(num_bytes):
            obstacle = f"This process may not lock {num_bytes} bytes of memory (`ulimit -l`)."
        if obstacle is not None:
            raise StrategyUnavailableError(obstacle)
        # The op shares a request out evenly: what does not divide so is read by a handle of its own.
        self._handles = [(deepspeed_aio.make_handle(threads), threads) for threads in sorted({1, self._threads})[::-1]]
        self._buffer = self._handles[0][0].new_cpu_locked_tensor(num_bytes, NOTHING).zero_()
        if not self.reads_swapped:
            self._values(source).copy_(source)

    def close(self) -> None:
        if self._buffer is not NOTHING:
            self._handles[0][0].free_cpu_locked_tensor(self._buffer)
        self._buffer, self._handles = NOTHING, []
        super().close()

    def _copy(self, destination: Tensor, source: Any) -> None:
        if self.reads_swapped:
            self._read(source)
        if self.copies:
            destination.copy_(self._values(source))

    def _values(self, source: Any) -> Tensor:
        """The buffer, as values of the source's dtype and shape."""
        return self._buffer.narrow(0, 0, source.nbytes).view(source.dtype).view(source.shape)

    def _read(self, source: SwappedTensor) -> None:
        """Reads the whole file. Its values are padded to the alignment, so no length is one that the op mistakes."""
        begin = 0
        with contextlib.ExitStack() as waiting:
            for handle, threads in self._handles:
                length = round_down(self._buffer.numel() - begin, math.lcm(ALIGNMENT_BYTES, threads))
                if length == 0:  # a wait would have nothing to wait for, and block
                    continue
                part = self._buffer.narrow(0, begin, length)
                if handle.async_pread(part, str(source.path), source.offset_bytes + begin) != 0:
                    raise StrategyUnavailableError(f"DeepSpeed's aio op refuses to read {source.path}.")
                waiting.callback(handle.wait)
                begin += length


class AioRead(SwapBuffer):
    summary = "nothing but reads of the file by DeepSpeed's aio op into its own locked buffer"
    reads_swapped = True
    copies = False


class DeepSpeedFromNvme(SwapBuffer):
    summary = "the aio op reads the whole file into a locked buffer, then DeepSpeed's blocking copy (ZeRO-3)"
    reads_swapped = True


class SwapBufferCopy(SwapBuffer):
    summary = "DeepSpeed's blocking copy alone, from memory that the aio op has locked"


class SwapBufferDirect(SwapBuffer):
    summary = "the same memory page-locked in place by pinned_direct"

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype, threads: int) -> None:
        super().__init__(accelerator, dtype, threads)
        self._direct = get_strategy("pinned_direct")(None, accelerator)

    @property
    def scratch_bytes(self) -> int:
        return self._direct.scratch_bytes

    def prepare(self, source: Any) -> None:
        super().prepare(source)
        self._direct.prepare(self._values(source))

    def close(self) -> None:
        self._direct.close()  # before the memory that it has page-locked goes
        super().close()

    def _copy(self, destination: Tensor, source: Any) -> None:
        self._direct.copy(destination, self._values(source))


def make_file_baselines(
    accelerator: Accelerator, dtype: torch.dtype, threads: int, request_bytes: int
) -> dict[str, Baseline]:
    """Each baseline by its name, in the order of a table; allocates nothing yet."""
    return {
        f"{RAW_READ}, {plural(threads, 'thread')}": RawRead(accelerator, dtype, threads, request_bytes),
        f"{RAW_READ}, DeepSpeed aio": AioRead(accelerator, dtype, threads),
        DEEPSPEED_FROM_NVME: DeepSpeedFromNvme(accelerator, dtype, threads),
        "DeepSpeed swap buffer": SwapBufferCopy(accelerator, dtype, threads),
        "swap buffer, pinned_direct": SwapBufferDirect(accelerator, dtype, threads),
    }
