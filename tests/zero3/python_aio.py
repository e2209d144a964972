"""DeepSpeed's aio op in Python: what its swappers call, with what it demands, and nothing done before ``wait``."""

import os
import types
from typing import ClassVar

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

#: Of lengths; and of the memory that the op makes.
BLOCK_BYTES, PAGE_BYTES = 512, 4096


class Handle:
    """An ``aio_handle``.

    Args:
        counts: Requests and bytes by "read" and "written", added to.
    """

    locked: ClassVar[set[int]] = set()

    def __init__(self, counts, block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism):
        self._counts, self._alignment = counts, BLOCK_BYTES * intra_op_parallelism
        self._waiting = []

    def get_alignment(self):
        return self._alignment

    def async_pread(self, buffer, path, offset=0):
        return self._start("read", buffer, path, offset)

    def async_pwrite(self, buffer, path, offset=0):
        return self._start("written", buffer, path, offset)

    def _start(self, what, buffer, path, offset):
        assert buffer.is_contiguous()
        assert buffer.nbytes % BLOCK_BYTES == 0
        if what == "written":
            assert self.is_pinned(buffer), "the swappers write out of buffers that the op has locked"
        self._waiting.append((what, buffer, path, offset))
        return 0

    def wait(self):
        assert self._waiting, "the op aborts the process here"
        waiting, self._waiting = self._waiting, []
        for what, buffer, path, offset in waiting:
            view = buffer.view(torch.uint8).numpy().data
            descriptor = os.open(path, os.O_RDONLY if what == "read" else os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                done = (os.preadv if what == "read" else os.pwritev)(descriptor, [view], offset)
            finally:
                os.close(descriptor)
            assert done == buffer.nbytes, "the op aborts the process at a short read"
            self._counts[what] = self._counts.get(what, 0) + done
        return len(waiting)

    def new_cpu_locked_tensor(self, numel, example):
        memory = torch.empty(numel * example.element_size() + PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        tensor = memory.narrow(0, start, numel * example.element_size()).view(example.dtype)
        self.locked.add(tensor.untyped_storage().data_ptr())
        return tensor

    def free_cpu_locked_tensor(self, tensor):
        self.locked.discard(tensor.untyped_storage().data_ptr())

    def is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.locked


def use():
    """Lets DeepSpeed use it in this process. Returns the counts: bytes "read" and "written" by DeepSpeed."""
    counts: dict[str, int] = {}

    def aio_handle(**options):
        return Handle(counts, **options)

    AsyncIOBuilder.load = lambda *_, **__: types.SimpleNamespace(aio_handle=aio_handle)
    AsyncIOBuilder.is_compatible = lambda *_, **__: True
    return counts
