"""What the tests of swap files share."""

import contextlib
import os
from unittest import mock

import torch

from transfer import NvmeSwappedTransfer, build_transfer, nvme

#: Values of the smallest chunk that holds the bytes under one checksum, as `swap_out` here writes them.
CHUNK = 2**16
CHECKSUM_BYTES = CHUNK * 4

#: Of programs that start processes: each import of torch takes a second, and a fork takes none.
PREAMBLE = """
import atexit, logging, os, select, signal, sys, threading, time, torch, traceback
from pathlib import Path
from transfer import *
from transfer import nvme
root = Path(sys.argv[1])
from tests.nvme.tools import swap_out
torch.set_num_threads(1)  # torch's own threads do not survive a fork

def child(work, *arguments):
    sys.stdout.flush()  # else each of them writes what waits in the buffer
    pid = os.fork()
    if pid == 0:
        signal.alarm(45)  # it does not outlive a test that failed
        try:
            work(*arguments)
            atexit._run_exitfuncs()  # as at its end; to tear torch down takes half a second more
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

class Gate:
    def __init__(self):
        self.read, self.write = os.pipe()
    def open(self, times=1):
        os.write(self.write, b"x" * times)
    def wait(self):
        assert select.select([self.read], [], [], 20)[0], "the other process has ended, or hangs"
        os.read(self.read, 1)
"""


def values(numel, dtype=torch.float32, seed=0):
    """Any bits, NaNs of every payload among them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw & 1).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


def same_bits(left, right):
    """Whether two host tensors have the same dtype, shape and bytes."""

    def raw(tensor):
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)  # of plain strides too

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(raw(left), raw(right))


def swap_out(tensor, directory, name=None, **options):
    """As `nvme.swap_out`, with a checksum for each small chunk."""
    return nvme.swap_out(tensor, directory, name, **{"checksum_bytes": CHECKSUM_BYTES, **options})


def make(accelerator, **options):
    """A transfer of small chunks, so that a file takes many."""
    return NvmeSwappedTransfer(
        accelerator=accelerator, **{"chunk_elements": CHUNK, "buffers": 4, "threads": 2, **options}
    )


def routed(accelerator, *, fallback=True, **options):
    """As ``make``, of a transfer that falls back."""
    section = {"chunk_elements": CHUNK, "buffers": 4, "threads": 2, **options}
    return build_transfer({"nvme_swapped": section, "fallback": fallback}, accelerator)


def device_copy(transfer, swapped, dtype=None):
    """The values of a file on the device of a transfer, and what the host sees of them."""
    accelerator = transfer.accelerator
    destination = accelerator.device_empty(*swapped.shape, dtype=dtype or swapped.dtype)
    destination.view(-1).view(torch.uint8).fill_(0x5A)
    transfer.copy(destination, swapped)
    return destination


def files_below(root):
    """Every file of values, finished or not."""
    return sorted(path for path in root.rglob("*") if path.suffix in (".swap", ".part"))


@contextlib.contextmanager
def patched(name, replacement):
    """Replaces a function of ``os`` by ``replacement(original, *args)``."""
    original = getattr(os, name)
    with mock.patch.object(os, name, lambda *args, **kwargs: replacement(original, *args, **kwargs)):
        yield


def flip(path, byte, bit):
    """Flips one bit of a file, which keeps its size."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))
