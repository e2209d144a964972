"""A file with optimizer state: all of a range is read or written, or an error says what is missing."""

import errno
import os
from pathlib import Path

import pytest

from transfer import SwapError, SwapSpaceError
from transfer.errors import SwapCorruptedError, SwapFileNotFoundError
from transfer.nvme.aligned_memory import aligned_empty, buffer_of
from transfer.zero3.swapped import state_file
from transfer.zero3.swapped.state_file import StateFile

SIZE = 5 * 4096 + 1024
CONTENT = bytes(range(256)) * (SIZE // 256)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(state_file, "_RETRIES", (0.0, 0.0, 0.0))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "exp_avg-0.tensor.swp"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def file(path):
    file = StateFile(str(path), SIZE)
    yield file
    file.close()


def memory_of(values):
    memory = buffer_of(aligned_empty(len(values)))
    memory[:] = values
    return memory


@pytest.mark.parametrize(("begin", "length"), [(0, SIZE), (4096, 4096), (5 * 4096, 1024)])
def test_ranges_are_read_and_written(path, file, begin, length):
    memory = memory_of(bytes(length))
    file.read(begin, memory)
    assert bytes(memory) == CONTENT[begin : begin + length]
    file.write(begin, memory_of(b"\xaa" * length))
    assert path.read_bytes() == CONTENT[:begin] + b"\xaa" * length + CONTENT[begin + length :]


@pytest.mark.parametrize("most", [512, 1000, 4096])
def test_short_transfers_go_on(path, file, monkeypatch, most):
    """Also where what is left is no multiple of a block, which O_DIRECT refuses."""
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda descriptor, parts, offset, whole=whole: whole(descriptor, [parts[0][:most]], offset)
        )
    memory = memory_of(bytes(SIZE))
    file.read(0, memory)
    assert bytes(memory) == CONTENT
    file.write(0, memory_of(CONTENT[::-1]))
    assert path.read_bytes() == CONTENT[::-1]


def failing(monkeypatch, name, times, number):
    """The system's call fails so many times; returns the list of its calls."""
    original, calls = getattr(os, name), []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    monkeypatch.setattr(os, name, fails)
    return calls


@pytest.mark.parametrize(("name", "method"), [("preadv", "read"), ("pwritev", "write")])
def test_what_fails_is_tried_again_three_times(file, monkeypatch, name, method):
    calls = failing(monkeypatch, name, 3, errno.EIO)
    getattr(file, method)(0, memory_of(CONTENT))
    assert len(calls) == 4


@pytest.mark.parametrize(("name", "method"), [("preadv", "read"), ("pwritev", "write")])
def test_what_keeps_failing_is_an_error_with_file_and_range(path, file, monkeypatch, name, method):
    calls = failing(monkeypatch, name, 99, errno.EIO)
    with pytest.raises(
        SwapError, match="1024 bytes of optimizer state from byte 4096 on cannot be .*Input/output"
    ) as caught:
        getattr(file, method)(4096, memory_of(bytes(1024)))
    assert len(calls) == 4
    assert caught.value.filename == str(path)


def test_a_full_drive_is_an_error_of_its_own(file, monkeypatch):
    failing(monkeypatch, "pwritev", 99, errno.ENOSPC)
    with pytest.raises(SwapSpaceError):
        file.write(0, memory_of(CONTENT))


def test_where_o_direct_is_refused_the_page_cache_serves(path, file, monkeypatch, caplog):
    original = os.preadv

    def refuses(descriptor, parts, offset):
        if descriptor == file._direct:
            raise OSError(errno.EINVAL, "not here")
        return original(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", refuses)
    memory = memory_of(bytes(SIZE))
    with caplog.at_level("INFO", "transfer"):
        file.read(0, memory)
    assert bytes(memory) == CONTENT
    assert "O_DIRECT is refused" in caplog.text


def test_a_write_that_transfers_nothing_is_an_error(file, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(SwapError):
        file.write(0, memory_of(CONTENT))


def test_a_file_that_was_cut_is_an_error(path, file):
    os.truncate(path, 4096)
    with pytest.raises(SwapCorruptedError, match="too short"):
        file.read(0, memory_of(bytes(SIZE)))


def test_what_cannot_be_opened_is_an_error_and_nothing_stays_open(tmp_path, path, monkeypatch):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SwapFileNotFoundError):
        StateFile(str(tmp_path / "other"), SIZE)
    with pytest.raises(SwapCorruptedError):
        StateFile(str(path), SIZE + 1)
    failing(monkeypatch, "posix_fallocate", 1, errno.ENOSPC)
    with pytest.raises(SwapSpaceError, match=f"no room for {SIZE} bytes"):
        StateFile(str(path), SIZE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_space_is_taken_when_a_file_is_opened(tmp_path):
    sparse = tmp_path / "sparse"
    sparse.touch()
    os.truncate(sparse, 2**20)
    assert sparse.stat().st_blocks == 0
    file = StateFile(str(sparse), 2**20)
    assert sparse.stat().st_blocks * 512 == 2**20
    file.close()


def test_a_file_that_was_replaced_is_noticed(path, file):
    assert file.is_there
    path.rename(path.with_suffix(".old"))
    assert not file.is_there
    path.write_bytes(CONTENT)
    assert not file.is_there


def test_closing_twice_closes_once(path):
    file = StateFile(str(path), SIZE)
    file.close()
    file.close()
