"""What drives, file systems and threads do to reads and writes: less than asked, refusals, failures."""

import errno
import os
import threading
import time

import pytest
import torch

from tests.nvme.tools import CHUNK, device_copy, files_below, make, patched, same_bits, swap_out, values
from transfer import (
    SwapCorruptedError,
    SwapError,
    nvme,
)

#: Bytes at most that a call transfers.
SHORT = [1000, 4096, 4097, 65_536]


@pytest.mark.parametrize("most", SHORT)
@pytest.mark.parametrize("checksums", [True, False])
def test_short_writes(root, most, checksums):
    """Also of the header, and to unaligned places."""
    tensor = values(300_000)
    calls = []

    def short(pwrite, descriptor, buffer, offset):
        view = memoryview(buffer)
        calls.append(len(view))
        whole = offset > 0 and len(calls) % 2 == 0  # the header never is
        written = len(view) if whole or len(view) == 1 else min(most, len(view) - 1)
        return min(pwrite(descriptor, view, offset), written)

    with patched("pwrite", short):
        swapped = swap_out(tensor, root, checksums=checksums)
    assert len(calls) > 3
    assert same_bits(nvme.swap_in(swapped), tensor)


@pytest.mark.parametrize("most", SHORT)
@pytest.mark.parametrize("checksums", [True, False])
def test_short_reads(root, any_accelerator, most, checksums):
    """A call transfers less than it could, as after a signal: a direct one too, and any number of bytes."""
    tensor = values(300_001)
    swapped = swap_out(tensor, root, checksums=checksums)
    calls = []

    def short(preadv, descriptor, buffers, offset):
        calls.append(len(buffers[0]))
        got = preadv(descriptor, buffers, offset)
        if len(calls) % 2 and got > most:
            buffers[0][most:got] = b"\xaa" * (got - most)  # what was not reported is not there
            return most
        return got

    with patched("preadv", short):
        assert same_bits(nvme.swap_in(swapped), tensor)
        with make(any_accelerator) as transfer:
            assert same_bits(device_copy(transfer, swapped).cpu(), tensor)
    assert len(calls) > 4


@pytest.mark.parametrize("refused", ["open", "preadv", "pwrite"])
@pytest.mark.parametrize("numel", [1000, 300_000])
def test_a_file_system_without_direct_access(root, any_accelerator, refused, numel):
    """Some refuse to open a file so, others to read or write it."""
    tensor = values(numel)
    direct, refusals = set(), []
    os_open = os.open

    def open_(call, path, flags, *args, **kwargs):
        if flags & os.O_DIRECT and refused == "open":
            refusals.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = call(path, flags, *args, **kwargs)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def transfer_bytes(call, descriptor, *rest):
        if descriptor in direct:
            refusals.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(descriptor, *rest)

    with patched("open", open_), patched(refused if refused != "open" else "preadv", transfer_bytes):
        swapped = swap_out(tensor, root)
        assert same_bits(nvme.swap_in(swapped), tensor)
        with make(any_accelerator) as transfer:
            assert same_bits(device_copy(transfer, swapped).cpu(), tensor)
    assert refusals
    assert os.open is os_open
    assert same_bits(nvme.swap_in(swapped), tensor)


class Marker(BaseException):
    """Ours alone."""


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), MemoryError("none left"), SystemExit(3), Marker()]
)
def test_a_read_that_fails(root, any_accelerator, after, error):
    tensor = torch.arange(CHUNK * 8.0)
    swapped = swap_out(tensor, root)
    calls = []

    def fail(preadv, *args):
        calls.append(1)
        if len(calls) > after:
            raise error
        return preadv(*args)

    destination = any_accelerator.device_empty(CHUNK * 8, dtype=torch.float32)
    destination.fill_(-1)
    kind = SwapError if isinstance(error, OSError) else type(error)
    transfer = make(any_accelerator, buffers=3, threads=2)
    with patched("preadv", fail), pytest.raises(kind) as caught:
        transfer.copy(destination, swapped)
    if isinstance(error, OSError):
        assert not isinstance(caught.value, SwapCorruptedError)
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(swapped.path)
        for part in ("262144 bytes from byte", "cannot be read", "Input/output error"):
            assert part in str(caught.value)
    else:
        assert caught.value is error
    now = destination.cpu()
    assert ((now == -1) | (now == tensor)).all()
    assert torch.equal(device_copy(transfer, swapped).cpu(), tensor)
    transfer.close()
    assert transfer.pinned_bytes == 0
    calls[:] = [1] * after
    with patched("preadv", fail), pytest.raises(kind):
        nvme.swap_in(swapped)


@pytest.mark.parametrize("where", [0, 1, 4])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError(), SystemExit(3), Marker()])
def test_a_write_that_fails_leaves_nothing(root, where, error):
    before = swap_out(torch.arange(3.0), root)
    calls = []

    def fail(pwrite, *args):
        calls.append(1)
        if len(calls) > where:
            raise error
        return pwrite(*args)

    kind = SwapError if isinstance(error, OSError) else type(error)
    with patched("pwrite", fail), pytest.raises(kind) as caught:
        swap_out(torch.zeros(5_000_000), root)
    if kind is SwapError:
        assert "20004864 bytes cannot be swapped out: Input/output error" in str(caught.value)
    assert files_below(root) == [before.path]
    assert nvme.swap_in(before).tolist() == [0, 1, 2]
    assert nvme.swap_in(swap_out(torch.ones(3), root)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("call", ["fsync", "posix_fallocate"])
def test_a_call_that_fails_leaves_nothing(root, call):
    swap_out(torch.ones(3), root).delete()

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    with patched(call, fail), pytest.raises(SwapError, match="Input/output error"):
        swap_out(torch.ones(3), root)
    assert not files_below(root)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV])
def test_a_file_system_that_cannot_reserve(root, number):
    def refuse(*args):
        raise OSError(number, "not here")

    tensor = values(3000)
    with patched("posix_fallocate", refuse):
        assert same_bits(nvme.swap_in(swap_out(tensor, root)), tensor)


@pytest.mark.parametrize("started", [0, 1])
def test_threads_that_cannot_be_started(root, simulated, monkeypatch, started):
    """At a limit of processes: what is read is read once, and not again when the memory serves another chunk.

    A pool that could not start a thread has queued the call nevertheless.
    """
    tensor = torch.arange(CHUNK * 12.0)
    swapped = swap_out(tensor, root)
    start, count = threading.Thread.start, []
    offsets, threads = [], set()

    def limited(thread):
        count.append(1)
        if len(count) > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    def recorded(preadv, descriptor, buffers, offset):
        offsets.append(offset)
        threads.add(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.01)  # busy, so that a pool wants another thread
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with patched("preadv", recorded), make(simulated, buffers=4, threads=8, checksums=False) as transfer:
        for _ in range(3):
            assert torch.equal(device_copy(transfer, swapped), tensor)
    assert sorted(offsets) == sorted([4096 + 4 * CHUNK * chunk for chunk in range(12)] * 3)
    assert (threading.main_thread() in threads) == (started == 0)
    assert len(threads) <= 1 + started
    assert torch.equal(nvme.swap_in(swap_out(tensor, root)), tensor)


@pytest.mark.parametrize(("request_bytes", "most"), [(4096, 4096), (2**16, 2**16), (2**18, 2**18), (2**20, 2**18)])
def test_a_thread_asks_for_no_more_than_request_bytes_at_a_time(root, simulated, request_bytes, most):
    """Although a checksum covers 2^18 bytes; and for no more than a chunk, which is 2^18 here too."""
    tensor = torch.arange(CHUNK * 2.0 + 3000)
    lengths = []

    def recorded(preadv, descriptor, buffers, offset):
        lengths.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    with patched("preadv", recorded), make(simulated, request_bytes=request_bytes) as transfer:
        assert torch.equal(device_copy(transfer, swap_out(tensor, root)), tensor)
    assert max(lengths) == most
    assert sum(lengths) == -(-tensor.nbytes // 4096) * 4096
