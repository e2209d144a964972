"""Full drives, refused memory, threads, interruptions: one clear error, nothing held, and the next copy is right."""

import dataclasses
import errno
import gc
import os
import re
import shutil
import signal
import textwrap
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from tests.nvme.tools import (
    CHUNK,
    PREAMBLE,
    device_copy,
    files_below,
    make,
    patched,
    routed,
    same_bits,
    swap_out,
    values,
)
from tests.running import run_program, run_threads, succeeds
from transfer import FallbackWarning, StrategyUnavailableError, SwapError, SwapSpaceError, TransferError, nvme


def run(program, root, **how):
    return run_program(PREAMBLE + textwrap.dedent(program), root, **how)


@pytest.mark.parametrize("free", [0, 4096, 4096 + 40_960 - 1])
def test_a_full_drive_is_noticed_before_anything_is_written(root, monkeypatch, free):
    before = swap_out(torch.arange(3.0), root)
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    written = []

    def reserves_nothing(*_):
        raise OSError(errno.EOPNOTSUPP, "as on some file systems")

    with (
        patched("pwrite", lambda *args: written.append(args)),
        patched("posix_fallocate", reserves_nothing),
        pytest.raises(SwapSpaceError) as caught,
    ):
        swap_out(torch.ones(10_000), root, checksum_bytes=4096)
    message = str(caught.value)
    for part in (f"{4096 + 40_960} bytes wanted, {free} free", "No space left", "swap out to another drive", str(root)):
        assert part in message
    assert isinstance(caught.value, OSError | TransferError)
    assert not written
    assert files_below(root) == [before.path]
    assert nvme.swap_in(before).tolist() == [0, 1, 2]
    monkeypatch.undo()
    assert nvme.swap_in(swap_out(torch.ones(3), root)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT"])
def test_a_drive_that_gets_full(root, call, number):
    import errno

    error = OSError(getattr(errno, number), os.strerror(getattr(errno, number)))
    before = None if call == "mkdir" else swap_out(torch.arange(3.0), root)
    calls = []

    def full(original, *args, **kwargs):
        calls.append(1)
        if call != "pwrite" or len(calls) > 3:
            raise error
        return original(*args, **kwargs)

    with patched(call, full), pytest.raises(SwapSpaceError, match=os.strerror(error.errno)) as caught:
        swap_out(torch.ones(10_000_000), root, threads=2)
    assert call == "mkdir" or re.search(r"4000\d{4} bytes wanted, \d+ free", str(caught.value))
    assert str(root) in caught.value.filename
    assert caught.value.errno == error.errno
    if before is not None:
        assert files_below(root) == [before.path]
        assert nvme.swap_in(before).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_a_limit_of_file_sizes(root):
    done = run(
        """
        import resource
        def limit(num_bytes):
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
        def refused():
            try:
                swap_out(torch.zeros(1_000_000), root)
            except SwapSpaceError as error:
                assert "4005888 bytes wanted" in str(error) or "directory" in str(error), error
                assert "File too large" in str(error) or "ulimit -f" in str(error), error
            else:
                raise SystemExit("was not refused")
        limit(1)
        refused()  # not even its directory can be made
        limit(resource.RLIM_INFINITY)
        before = swap_out(torch.arange(3.0), root)
        limit(1_000_000)
        refused()  # at the start
        os.posix_fallocate = lambda *args: None
        refused()  # in the middle
        names = sorted(path.name for path in before.path.parent.iterdir())
        assert names == ["lock", "machine", before.path.name], names
        assert nvme.swap_in(before).tolist() == [0, 1, 2]
        assert nvme.swap_in(swap_out(torch.ones(3), root)).tolist() == [1, 1, 1]
        """,
        root,
    )
    succeeds(done)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="This system has no /dev/full.")
def test_the_device_that_is_always_full(root):
    swapped = swap_out(torch.arange(3.0), root)

    with Path("/dev/full").open("wb") as full:

        def to_full(pwrite, _descriptor, *rest):
            return pwrite(full.fileno(), *rest)

        with patched("pwrite", to_full), pytest.raises(SwapSpaceError, match="No space left"):
            swap_out(torch.ones(100), root)
    assert files_below(root) == [swapped.path]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_refused_pinning_falls_back_with_one_warning(root, simulated, after):
    swapped = swap_out(torch.arange(200_000.0), root)
    transfer = routed(simulated)
    error = RuntimeError("cudaHostAlloc: out of memory")
    with (
        failing(simulated, "pin_empty", error, after=after, times=1000),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(5):
            result = device_copy(transfer, swapped, torch.bfloat16)
            assert same_bits(result, torch.arange(200_000.0).bfloat16())
    assert simulated.pinned_bytes == transfer.pinned_bytes == transfer.scratch_bytes == 0
    assert [warning.category for warning in caught] == [FallbackWarning]
    message = str(caught[0].message)
    for part in (
        "nvme_swapped needs 1048576 bytes of pinned memory on simulated (4 buffers of 262144 bytes)",
        "cudaHostAlloc: out of memory",
        "ulimit -l",
        "`nvme_swapped.chunk_elements`",
        "`nvme_swapped.pinned: false`",
        "`fallback: false`",
    ):
        assert part in message


def test_refused_pinning_is_an_error_where_no_fallback_is_wanted(root, simulated):
    swapped = swap_out(torch.ones(10), root)
    transfer = routed(simulated, fallback=False)
    with failing(simulated, "pin_empty", RuntimeError("no"), after=1, times=1000):
        for _ in range(2):
            with pytest.raises(StrategyUnavailableError, match="1048576 bytes .* failed: no"):
                device_copy(transfer, swapped)
    assert simulated.pinned_bytes == 0


def test_refused_scratch_falls_back_with_one_warning(root, simulated):
    swapped = swap_out(torch.arange(200_000.0), root)
    transfer, strict = routed(simulated), routed(simulated, fallback=False)
    destination = simulated.device_empty(200_000, dtype=torch.bfloat16)
    with failing(simulated, "device_empty", RuntimeError("device out of memory"), times=1000):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                destination.fill_(-1)
                transfer.copy(destination, swapped)
                assert same_bits(destination, torch.arange(200_000.0).bfloat16())
        with pytest.raises(StrategyUnavailableError, match="524288 bytes of device scratch are refused"):
            strict.copy(destination, swapped)
    assert [warning.category for warning in caught] == [FallbackWarning]
    assert "524288 bytes of device scratch are refused: device out of memory" in str(caught[0].message)
    assert "`nvme_swapped.cast: host`" in str(caught[0].message)
    assert transfer.scratch_bytes == 0
    transfer.close()
    strict.close()
    assert simulated.pinned_bytes == 0


def test_accelerators_without_streams_or_events(root):
    swapped = swap_out(torch.arange(200_000.0), root)
    for lacking in ({"streams": False}, {"events": False}, {"streams": False, "events": False}, {"eager": True}):
        simulated = SimulatedAccelerator(**lacking)
        with make(simulated) as transfer:
            assert same_bits(device_copy(transfer, swapped, torch.bfloat16), torch.arange(200_000.0).bfloat16())
        assert simulated.pinned_bytes == 0


class ReadsPageableLate(SimulatedAccelerator):
    """As on MPS: no pinned memory, and copies out of any memory that happen later."""

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, pins_host_memory=False)

    def enqueue_copy(self, destination, source):
        self._queue.enqueue(self._queue.current_stream, destination.detach(), source.detach())


@pytest.mark.parametrize("lacking", [{}, {"streams": False}])
def test_pageable_memory_that_is_read_late(root, lacking):
    swapped = swap_out(torch.arange(CHUNK * 6.0), root)
    with make(ReadsPageableLate(**lacking), buffers=2) as transfer:
        assert same_bits(device_copy(transfer, swapped, torch.bfloat16), torch.arange(CHUNK * 6.0).bfloat16())


def test_four_threads_share_a_transfer(root, any_accelerator):
    transfer = make(any_accelerator, path=str(root), threads=2)
    wrong = []

    def work(value):
        for numel in (1, 1000, 100_007) * 4:
            swapped = transfer.swap_out(torch.full((numel,), value), "same")
            if not (device_copy(transfer, swapped, torch.bfloat16) == value).all():
                wrong.append((value, numel))
            if not (nvme.swap_in(swapped) == value).all():
                wrong.append((value, numel))

    run_threads(work, map(float, range(4)))
    assert not wrong
    transfer.close()
    assert transfer.pinned_bytes == 0
    assert not files_below(root)


def test_threads_read_one_handle(root, simulated):
    tensor = values(300_001)
    swapped = swap_out(tensor, root)
    results = []
    threads = [threading.Thread(target=lambda: results.append(nvme.swap_in(swapped, threads=2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert all(same_bits(result, tensor) for result in results)


def interrupted_while(call, root, wait):
    """Ctrl-C half-way, in the main thread; returns whether it arrived."""
    timers = []

    def later(seconds):
        timers.append(threading.Timer(seconds, signal.raise_signal, (signal.SIGINT,)))
        timers[-1].start()

    def arrive(_signal, frame):
        while frame is not None:
            if frame.f_code.co_filename == weakref.__file__:  # in a finalizer, where Python drops what is raised
                later(0.001)
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, arrive)
    try:
        later(wait)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGINT, before)
    return False


@pytest.mark.parametrize("repeat", range(3))
def test_an_interruption_while_reading(root, any_accelerator, repeat):
    tensor = torch.arange(CHUNK * 6.0)
    swapped = swap_out(tensor, root)
    reading = []

    def slow(preadv, *args):
        reading.append(1)
        time.sleep(0.05)
        got = preadv(*args)
        reading.pop()
        return got

    transfer = make(any_accelerator, threads=2, buffers=3)
    destination = any_accelerator.device_empty(CHUNK * 6, dtype=torch.float32)
    destination.fill_(-1)
    with patched("preadv", slow):
        assert interrupted_while(lambda: transfer.copy(destination, swapped), root, 0.02 + 0.04 * repeat)
        assert not reading, "nothing reads into memory that is not ours any more"
    now = destination.cpu()
    assert ((now == -1) | (now == tensor)).all()
    assert torch.equal(device_copy(transfer, swapped).cpu(), tensor)
    transfer.close()
    assert transfer.pinned_bytes == 0
    with patched("preadv", slow):
        assert interrupted_while(lambda: nvme.swap_in(swapped), root, 0.02)
    assert torch.equal(nvme.swap_in(swapped), tensor)


@pytest.mark.slow
def test_an_interruption_while_workers_are_started(root):
    """Those that were started already go back to the pool: else the next copy, and the end of the process, hang.

    The file takes several requests, and so several workers.
    """
    done = run(
        """
        from accelerators.simulated import SimulatedAccelerator
        from transfer.nvme import read_ahead
        def interrupted(pool, call):
            future = start_on(pool, call)
            if len(started) == 1:
                raise KeyboardInterrupt
            started.append(future)
            return future
        start_on, read_ahead.start_on, started = read_ahead.start_on, interrupted, []
        transfer = NvmeSwappedTransfer(accelerator=SimulatedAccelerator(), chunk_elements=65_536, threads=2)
        destination = transfer.accelerator.device_empty(3_000_000, dtype=torch.bfloat16)
        swapped = swap_out(torch.ones(3_000_000), root)
        for read in (lambda: transfer.copy(destination, swapped), lambda: nvme.swap_in(swapped)):
            started.clear()
            try:
                read()
            except KeyboardInterrupt:
                print("stopped")
        read_ahead.start_on = start_on
        transfer.copy(destination, swapped)
        assert (destination == 1).all()
        """,
        root,
        timeout=20,
    )
    succeeds(done, "stopped\nstopped\n")


def test_an_interruption_while_writing(root):
    before = swap_out(torch.arange(3.0), root)

    def slow(pwrite, *args):
        time.sleep(0.05)
        return pwrite(*args)

    with patched("pwrite", slow):
        assert interrupted_while(lambda: swap_out(torch.zeros(4_000_000), root, threads=2), root, 0.07)
    assert files_below(root) == [before.path]
    assert nvme.swap_in(before).tolist() == [0, 1, 2]


@pytest.mark.parametrize("closer", ["close", "close in another thread", "drop"])
def test_a_close_with_copies_in_flight(root, simulated, closer):
    tensor = torch.arange(CHUNK * 3.0)
    swapped = swap_out(tensor, root)
    transfer = make(simulated)
    destination = simulated.device_empty(CHUNK * 3, dtype=torch.float32)
    copied = transfer.submit(destination, swapped)
    swapped.delete()  # it is done with the source
    if closer == "close":
        transfer.close()
    elif closer == "drop":
        del transfer
        gc.collect()
    else:
        thread = threading.Thread(target=transfer.close)
        thread.start()
        thread.join(30)
    assert simulated.pinned_bytes == 0
    assert torch.equal(destination, tensor)
    copied.wait()
    assert copied.done


def test_a_destination_that_is_dropped_lives_as_long_as_its_copy(root, simulated):
    """Else other code is given its memory while streams of ours still write to it."""
    swapped = swap_out(values(3 * CHUNK), root)
    transfer = make(simulated)
    # A device whose queue keeps nothing alive, as a real one's does not.
    simulated.enqueue_copy = lambda destination, source: None
    destination = simulated.device_empty(3 * CHUNK, dtype=torch.bfloat16)
    storage = weakref.ref(destination.untyped_storage())
    transfer.submit(destination, swapped)
    del destination
    gc.collect()
    assert storage() is not None
    transfer.close()
    gc.collect()
    assert storage() is None


def test_a_close_inside_a_copy_that_looks_for_its_buffers(root, simulated):
    """As from a finalizer or a signal handler, between the start of a copy and its first look at the ring."""
    tensor = values(3 * CHUNK)
    swapped = swap_out(tensor, root)
    transfer = make(simulated)
    device_copy(transfer, swapped)
    on_device, closes = simulated.on_device, iter([transfer.close])

    def closing(each):
        next(closes, lambda: None)()
        return on_device(each)

    simulated.on_device = closing
    assert same_bits(device_copy(transfer, swapped), tensor)
    transfer.close()
    assert transfer.pinned_bytes == simulated.pinned_bytes == 0


def test_a_close_while_another_thread_reads(root, simulated):
    tensor = torch.arange(CHUNK * 6.0)
    swapped = swap_out(tensor, root)
    transfer, started = make(simulated, threads=1, buffers=2), threading.Event()

    def slow(preadv, *args):
        started.set()
        time.sleep(0.02)
        return preadv(*args)

    results = []
    with patched("preadv", slow):
        thread = threading.Thread(target=lambda: results.append(device_copy(transfer, swapped)))
        thread.start()
        assert started.wait(30)
        transfer.close()
        thread.join(30)
    assert torch.equal(results[0], tensor)
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_a_hundred_swaps_leak_nothing(root, simulated):
    def held():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    swap_out(torch.ones(3), root)
    transfer = make(simulated, threads=2, buffers=2)
    device_copy(transfer, swap_out(torch.ones(3 * CHUNK), root))
    before = held()
    damaged = swap_out(torch.ones(3), root)
    os.truncate(damaged.path, 4096)
    for index in range(100):
        swapped = swap_out(torch.full((100,), float(index)), root, threads=2)
        assert device_copy(transfer, swapped)[7] == index
        if index % 10 == 0:
            assert nvme.swap_in(swapped, threads=2)[7] == index
            for read in (nvme.swap_in, lambda handle: device_copy(transfer, handle)):
                with pytest.raises(SwapError):
                    read(damaged)
    assert held() == before
    assert files_below(root) == sorted([swapped.path, damaged.path])
    transfer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("h2d-")]
    assert simulated.pinned_bytes == 0


@pytest.mark.slow
def test_memory_that_a_large_tensor_takes(root):
    """Writing holds 4 MiB a thread, and not the tensor once more; reading holds it once."""
    done = run(
        """
        def peak_mib():
            status = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) >> 10
        def reset():
            Path("/proc/self/clear_refs").write_text("5")
        nvme.swap_in(swap_out(torch.ones(3_000_000), root))
        tensor = torch.ones(16, 2**20)  # 64 MiB
        swapped = swap_out(tensor[:1], root)
        for values, most in ((tensor, 40), (tensor[:, : 2**19], 40 + 32)):
            reset()
            before = peak_mib()
            swapped = swap_out(values, root, threads=4)
            assert peak_mib() - before < most, (values.shape, peak_mib() - before)
        swapped = swap_out(tensor, root)
        reset()
        before = peak_mib()
        nvme.swap_in(swapped)
        assert peak_mib() - before < 64 + 40, peak_mib() - before
        """,
        root,
    )
    assert (done.returncode, done.stderr) == (0, "")
