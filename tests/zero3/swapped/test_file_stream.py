"""Tiles of state pass through memory in order: files and device hold what updates made, whatever is late or fails."""

import contextlib
import errno
import os
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerators.simulated import SimulatedAccelerator
from transfer import SwapError, build_transfer
from transfer.errors import TransferError
from transfer.measured.profile import Drive, DriveRate
from transfer.zero3.swapped import file_stream, state_file
from transfer.zero3.swapped.file_stream import FileStream
from transfer.zero3.swapped.slots import Tile
from transfer.zero3.swapped.state_file import StateFile

TILE = 1024
DIRECT = {"strategy": "pinned_direct", "fallback": False}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(state_file, "_RETRIES", (0.0,))


class Training:
    """Sub-groups in files, and steps that add one to each master, two and three to its moments."""

    def __init__(self, folder, sizes, seed=0, tile=TILE, drive=None, resident=0):
        self.tile = tile
        self.accelerator = SimulatedAccelerator(seed=seed)
        self.transfer = build_transfer(DIRECT, self.accelerator)
        self.stream = FileStream(self.transfer, tile, drive, resident)
        self.sizes, self.steps, self.copies = sizes, 0, []
        self.files = []
        for number, size in enumerate(sizes):
            paths = [folder / f"{number}-{kind}" for kind in range(3)]
            for kind, path in enumerate(paths):
                path.write_bytes(self.expected(number, kind, 0).numpy().tobytes() + bytes(-4 * size % 1024))
            self.files.append([StateFile(str(path), 4 * size) for path in paths])
        self.partitions = [self.accelerator.device_empty(size, dtype=torch.bfloat16) for size in sizes]

    def expected(self, number, kind, steps):
        return torch.arange(float(self.sizes[number])) % 97 + 10 * kind + steps * (kind + 1)

    def tiles(self):
        for number, size in enumerate(self.sizes):
            for offset in range(0, size, self.tile):
                length = min(self.tile, size - offset)
                yield Tile(number, offset, length, self.files[number], offset + length == size)

    def submit(self, tile):
        def submit(offset, length, master):
            copy = self.transfer.submit(self.partitions[tile.sub_group_id].narrow(0, offset, length), master)
            self.copies.append(copy)
            return copy

        return submit

    def step(self, until=None):
        """All tiles, or so many."""
        tiles = list(self.tiles())
        self.stream.begin(tiles)
        for tile in tiles[:until]:
            for kind, part in enumerate(self.stream.take(tile.sub_group_id, tile.offset)):
                assert part.shape == (tile.length,)
                part.add_(kind + 1)
            self.stream.updated(self.submit(tile))
        self.stream.settle()
        self.steps += 1

    def check(self):
        self.stream.flush()
        for copy in self.copies:
            copy.wait()
        self.accelerator.synchronize()
        for number, size in enumerate(self.sizes):
            for kind, file in enumerate(self.files[number]):
                values = torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.float32)[:size]
                assert torch.equal(values, self.expected(number, kind, self.steps)), (number, kind)
            assert torch.equal(self.partitions[number], self.expected(number, 0, self.steps).bfloat16())

    def close(self):
        self.stream.close()
        for file in (file for files in self.files for file in files):
            file.close()


@pytest.fixture
def training(tmp_path):
    training = Training(tmp_path, [TILE * 6 + 100, 300, TILE * 2])
    yield training
    training.close()
    assert training.transfer.pinned_bytes == 0


def test_steps_pass(training):
    for _ in range(3):
        training.step()
        training.check()


def test_a_transfer_that_was_closed_between_steps_locks_its_memory_again(training):
    training.step()
    locked = training.transfer.pinned_bytes
    training.transfer.close()  # as another engine does that shares it
    training.step()  # `fallback: false`: each copy is direct
    training.check()
    assert training.transfer.pinned_bytes == locked > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7 * TILE), min_size=1, max_size=4), st.integers(0, 2**16), st.integers(1, 3))
def test_any_sizes_and_orders_of_copies(tmp_path_factory, sizes, seed, steps):
    training = Training(tmp_path_factory.mktemp("state"), sizes, seed)
    for _ in range(steps):
        training.step()
    training.check()
    training.close()


def test_threads_and_requests_are_those_of_the_machines_profile(tmp_path, monkeypatch):
    rates = [(1, 4096, 5.0, 9.0), (3, 8192, 9.0, 5.0)]  # threads, bytes, and how fast they read and write
    names = ("threads", "request_bytes", "read_bytes_per_second", "written_bytes_per_second")
    rates = [DriveRate(**dict(zip(names, rate, strict=True))) for rate in rates]
    drive = Drive(file_system="ext4", direct=True, rates=rates)
    training = Training(tmp_path, [TILE * 24], tile=TILE * 4, drive=drive)
    seen = {"preadv": set(), "pwritev": set()}
    threads = {"preadv": set(), "pwritev": set()}
    for name in seen:
        original = getattr(os, name)

        def noting(descriptor, parts, offset, name=name, original=original):
            seen[name].add(len(parts[0]))
            threads[name].add(threading.get_ident())
            time.sleep(0.001)
            return original(descriptor, parts, offset)

        monkeypatch.setattr(os, name, noting)
    training.step()
    training.check()
    training.close()
    assert seen == {"preadv": {8192}, "pwritev": {4096}}
    assert (len(threads["preadv"]), len(threads["pwritev"])) == (3, 1)


def test_of_the_profile_reading_and_writing_at_once_counts(tmp_path, monkeypatch):
    names = ("threads", "request_bytes", "read_bytes_per_second", "written_bytes_per_second")
    one, both = (
        DriveRate(**dict(zip(names, rate, strict=True))) for rate in ((1, 4096, 9.0, 9.0), (2, 8192, 5.0, 5.0))
    )
    drive = Drive(file_system="ext4", direct=True, rates=(one,), mixed=(both,))
    training, sizes = Training(tmp_path, [TILE * 24], tile=TILE * 4, drive=drive), set()
    for name in ("preadv", "pwritev"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, original=original: sizes.add(len(given[1][0])) or original(*given))
    training.step()
    training.close()
    assert sizes == {8192}


@pytest.mark.parametrize("late", ["preadv", "pwritev"])
def test_late_requests_are_waited_for(training, monkeypatch, late):
    original = getattr(os, late)

    def slow(*arguments):
        time.sleep(0.003)
        return original(*arguments)

    monkeypatch.setattr(os, late, slow)
    for _ in range(2):
        training.step()
    training.check()


def test_reads_run_ahead_and_writes_behind(training, monkeypatch):
    """While a tile is updated, the next ones were read; nobody waits for its write."""
    read, write, gate = set(), os.pwritev, threading.Event()
    original = os.preadv

    def noting(descriptor, parts, offset):
        read.add((descriptor, offset))
        return original(descriptor, parts, offset)

    def held(*arguments):
        gate.wait(30)
        return write(*arguments)

    monkeypatch.setattr(os, "preadv", noting)
    monkeypatch.setattr(os, "pwritev", held)
    tiles = list(training.tiles())
    training.stream.begin(tiles)
    for tile in tiles[: file_stream.SLOTS]:  # a fifth has no slot before the first is written
        for kind, part in enumerate(training.stream.take(tile.sub_group_id, tile.offset)):
            part.add_(kind + 1)
        training.stream.updated(training.submit(tile))
    assert len(read) == 3 * file_stream.SLOTS
    gate.set()
    for tile in tiles[file_stream.SLOTS :]:
        for kind, part in enumerate(training.stream.take(tile.sub_group_id, tile.offset)):
            part.add_(kind + 1)
        training.stream.updated(training.submit(tile))
    training.stream.settle()
    training.steps = 1
    training.check()


def refuse(monkeypatch, name, numbers, error=errno.EIO):
    """The system's calls with these numbers fail, counted from 0, until the returned event is set."""
    original, count, over, lock = getattr(os, name), [0], threading.Event(), threading.Lock()

    def fails(*arguments):
        with lock:
            number, count[0] = count[0], count[0] + 1
        if number in numbers and not over.is_set():
            raise OSError(error, os.strerror(error)) if isinstance(error, int) else error
        return original(*arguments)

    monkeypatch.setattr(os, name, fails)
    return over


@pytest.mark.parametrize("number", range(0, 36, 5))
def test_a_write_that_fails_once_is_made_again(training, monkeypatch, number):
    refuse(monkeypatch, "pwritev", {number})
    training.step()
    training.check()


@pytest.mark.parametrize("first", range(0, 30, 7))
def test_what_could_not_be_written_stays_until_it_is(training, monkeypatch, first):
    """Every further write fails from one on: the drive is full."""
    over = refuse(monkeypatch, "pwritev", range(first, 10**6), errno.ENOSPC)
    with pytest.raises(SwapError, match="optimizer state"):
        training.step()
    with pytest.raises((SwapError, TransferError)):
        training.stream.check()
    over.set()
    if first > 3 * (len(list(training.tiles())) - file_stream.SLOTS):
        training.steps = 1  # all tiles were updated, and the last of them had slots of their own
        training.stream.settle()
        training.check()
        training.step()
        training.check()
    else:  # the step ended in its middle: what was updated is written, and no step follows
        with pytest.raises(TransferError, match="load a checkpoint"):
            training.step()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("of a vendor"), KeyboardInterrupt()])
def test_whatever_a_write_fails_with_its_tile_stays(training, monkeypatch, error):
    over = refuse(monkeypatch, "pwritev", range(21, 10**6), error)
    with pytest.raises(SwapError, match="optimizer state"):
        training.step()
    over.set()
    training.steps = 1
    training.step()
    training.check()


def test_what_could_not_be_written_is_not_written_over_a_checkpoint(training, monkeypatch):
    over = refuse(monkeypatch, "pwritev", range(24, 10**6))
    with pytest.raises(SwapError):
        training.step()
    over.set()
    for files in training.files:
        for file in files:
            file.path.write_bytes(bytes(file.num_bytes))
    assert not training.stream.forget(), "all of the step was updated"
    assert not any(any(file.path.read_bytes()) for files in training.files for file in files)


def test_a_read_that_fails_leaves_the_tile_for_whoever_asks_again(training, monkeypatch):
    original, over = os.preadv, threading.Event()

    def fails(descriptor, parts, offset):
        if offset >= 4 * TILE and not over.is_set():  # not by number: threads may overtake each other
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", fails)
    tiles = list(training.tiles())
    training.stream.begin(tiles)
    taken = training.stream.take(0, 0)
    for kind, part in enumerate(taken):
        part.add_(kind + 1)
    training.stream.updated(training.submit(tiles[0]))
    with pytest.raises(SwapError, match="cannot be read"):
        training.stream.take(0, TILE)
    over.set()
    for tile in tiles[1:]:
        for _ in range(3):  # those that were read ahead have failed as well
            with contextlib.suppress(SwapError):
                taken = training.stream.take(tile.sub_group_id, tile.offset)
                break
        for kind, part in enumerate(taken):
            part.add_(kind + 1)
        training.stream.updated(training.submit(tile))
    training.stream.settle()
    training.steps = 1
    training.check()


def test_a_step_that_ends_in_its_middle_wants_a_checkpoint(training):
    training.step(until=2)
    with pytest.raises(TransferError, match="load a checkpoint"):
        training.step()
    training.stream.forget()
    for number in range(3):
        for kind, file in enumerate(training.files[number]):
            size = training.sizes[number]
            file.path.write_bytes(training.expected(number, kind, 1).numpy().tobytes() + bytes(-4 * size % 1024))
    training.files = [[StateFile(str(each.path), 4) for each in files] for files in training.files]
    training.step()
    training.check()


def test_a_step_that_ends_between_sub_groups_is_only_shorter(training):
    """As where Ctrl-C comes: the update of the sub-group is finished, and the others keep their state."""
    training.step(until=7)
    training.sizes, whole = training.sizes[:1], training.sizes
    training.check()
    training.sizes, training.steps = whole, 0
    for number in (1, 2):
        for kind, file in enumerate(training.files[number]):
            values = torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.float32)[: whole[number]]
            assert torch.equal(values, training.expected(number, kind, 0))
    training.stream.check()  # raises nothing


def test_what_is_not_the_next_tile_is_refused(training):
    with pytest.raises(TransferError, match="no tile"):
        training.stream.take(0, 0)
    training.stream.settle()
    training.stream.forget()
    training.stream.begin(list(training.tiles()))
    with pytest.raises(TransferError, match="not the next"):
        training.stream.take(0, TILE)


def test_a_stream_whose_memory_cannot_be_locked_holds_nothing(monkeypatch):
    accelerator = SimulatedAccelerator(seed=0)
    transfer = build_transfer(DIRECT, accelerator)
    prepare, calls = transfer.prepare, []

    def refuses(source):
        calls.append(source)
        if len(calls) == 2:
            raise MemoryError
        prepare(source)

    monkeypatch.setattr(transfer, "prepare", refuses)
    before = threading.active_count()
    stream = FileStream(transfer, TILE, resident_bytes=20_000)
    with pytest.raises(MemoryError):
        stream.begin([Tile(0, TILE * number, TILE, [], number == 9) for number in range(10)])
    stream.close()
    assert transfer.pinned_bytes == 0
    assert threading.active_count() == before
