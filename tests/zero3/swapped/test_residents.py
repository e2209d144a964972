"""Tiles that stay in host memory: never read or written in a step, and in their files when somebody reads those."""

import errno
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zero3.swapped.test_file_stream import TILE, Training, refuse
from transfer import SwapError
from transfer.zero3.swapped import file_stream, state_file

TILE_BYTES = 3 * 4 * TILE
SIZES = [TILE * 6, TILE * 4, TILE * 10]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(state_file, "_RETRIES", (0.0,))


def transferred(monkeypatch):
    """The bytes that are read and written from now on."""
    count = {"preadv": 0, "pwritev": 0}
    for name in count:
        original = getattr(os, name)

        def counting(descriptor, parts, offset, name=name, original=original):
            count[name] += sum(map(len, parts))
            return original(descriptor, parts, offset)

        monkeypatch.setattr(os, name, counting)
    return count


@pytest.mark.parametrize(("resident", "passing"), [(20, 0), (100, 0), (10, 10), (5, 15), (0, 20)])
def test_only_what_passes_moves_in_a_step(tmp_path, monkeypatch, resident, passing):
    training = Training(tmp_path, SIZES, resident=resident * TILE_BYTES)
    training.step()
    count = transferred(monkeypatch)
    training.step()
    training.step()
    assert count == {"preadv": 2 * passing * TILE_BYTES, "pwritev": 2 * passing * TILE_BYTES}
    training.check()
    assert count["pwritev"] == (2 * passing + 20 - passing) * TILE_BYTES
    training.check()
    assert count["pwritev"] == (2 * passing + 20 - passing) * TILE_BYTES, "nothing is written twice"
    training.close()


def test_memory_is_what_was_allowed_and_given_back(tmp_path):
    training = Training(tmp_path, SIZES, resident=7 * TILE_BYTES + 1)
    training.step()
    assert training.stream.resident_bytes == 7 * TILE_BYTES
    slots = 7 + file_stream.SLOTS
    assert training.stream.num_bytes == slots * TILE_BYTES
    assert training.transfer.pinned_bytes - slots * TILE_BYTES // 3 in range(2 * 4097)  # so that both are aligned
    training.close()
    assert training.transfer.pinned_bytes == 0


def test_residents_are_spread_over_the_stream(tmp_path, monkeypatch):
    """No more than one tile that stays, or that passes, follows another one where half of them stay."""
    training = Training(tmp_path, [TILE * 20], resident=10 * TILE_BYTES)
    training.step()
    read, original = set(), os.preadv

    def noting(descriptor, parts, offset):
        read.add(offset // (4 * TILE))
        return original(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", noting)
    training.step()
    assert len(read) == 10
    assert all(len(read & {number, number + 1, number + 2}) < 3 for number in range(18))
    training.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5 * TILE), min_size=1, max_size=4), st.integers(0, 20), st.integers(0, 2**16))
def test_any_sizes_and_shares(tmp_path_factory, sizes, resident, seed):
    training = Training(tmp_path_factory.mktemp("state"), sizes, seed, resident=resident * TILE_BYTES)
    for number in range(4):
        training.step()
        if number == 1:
            training.check()
    training.check()
    training.close()


def test_closing_writes_what_stays(tmp_path):
    training = Training(tmp_path, SIZES, resident=20 * TILE_BYTES)
    training.step()
    training.step()
    training.stream.close()
    for number, size in enumerate(SIZES):
        for kind, file in enumerate(training.files[number]):
            values = torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.float32)[:size]
            assert torch.equal(values, training.expected(number, kind, 2))


def test_what_could_not_be_flushed_stays_and_is_flushed_later(tmp_path, monkeypatch):
    training = Training(tmp_path, SIZES, resident=20 * TILE_BYTES)
    training.step()
    over = refuse(monkeypatch, "pwritev", range(17, 10**6), errno.ENOSPC)
    for _ in range(2):
        with pytest.raises(SwapError, match="optimizer state"):
            training.stream.flush()
        assert training.stream.is_dirty
    training.step()  # needs no drive
    over.set()
    training.check()
    training.close()


def test_a_read_that_fails_in_the_first_step_is_made_again(tmp_path, monkeypatch):
    training = Training(tmp_path, [TILE * 4], resident=4 * TILE_BYTES)
    over = refuse(monkeypatch, "preadv", range(10**6))
    tiles = list(training.tiles())
    training.stream.begin(tiles)
    with pytest.raises(SwapError, match="cannot be read"):
        training.stream.take(0, 0)
    over.set()
    for tile in tiles:
        for _ in range(2):
            try:
                parts = training.stream.take(tile.sub_group_id, tile.offset)
                break
            except SwapError:
                continue  # it was read ahead
        for kind, part in enumerate(parts):
            part.add_(kind + 1)
        training.stream.updated(training.submit(tile))
    training.stream.settle()
    training.steps = 1
    training.check()
    training.close()


def test_files_that_others_have_written_are_read_anew(tmp_path):
    training = Training(tmp_path, SIZES, resident=10 * TILE_BYTES)
    training.step()
    training.check()
    for number, size in enumerate(SIZES):
        for kind, file in enumerate(training.files[number]):
            file.path.write_bytes(training.expected(number, kind, 5).numpy().tobytes() + bytes(-4 * size % 1024))
    training.stream.drop()
    training.steps = 5
    training.step()
    training.check()
    training.close()


def test_a_checkpoint_makes_what_stays_void(tmp_path):
    training = Training(tmp_path, SIZES, resident=20 * TILE_BYTES)
    training.step()
    training.step()
    for number, size in enumerate(SIZES):
        for kind, file in enumerate(training.files[number]):
            file.path.write_bytes(training.expected(number, kind, 1).numpy().tobytes() + bytes(-4 * size % 1024))
    training.stream.forget()
    training.steps = 1
    training.step()
    training.check()
    training.close()
