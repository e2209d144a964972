"""Files and handles that somebody else has made: an error of ours, in bounded time and memory."""

import dataclasses
import json
import pickle
import resource
import struct

import pytest
import torch
import xxhash

from tests.nvme.tools import swap_out
from transfer import SwapCorruptedError, SwapError, SwappedTensor, TransferError, nvme

DESCRIPTION = {"dtype": "float32", "shape": [3], "offset_bytes": 4096, "block_bytes": 0, "stamp": "00"}


def forged(path, table=b"", size=8192, **changes):
    """A file whose header is whole, and says what its maker wants."""
    text = json.dumps({**DESCRIPTION, **changes}).encode()
    before = struct.pack("<8sII", b"H2DSWAP\n", 1, len(text)) + text + table
    path.write_bytes(before + struct.pack("<Q", xxhash.xxh3_64_intdigest(before)))
    with path.open("r+b") as file:
        file.truncate(max(size, path.stat().st_size))
    return path


def test_a_forged_header_is_like_a_right_one_where_it_is_right(tmp_path):
    path = forged(tmp_path / "file")
    assert nvme.swap_in(SwappedTensor(path, torch.float32, torch.Size([3]), 4096, None, "00")).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "_dynamo"},
        {"dtype": "nn"},
        {"dtype": "../x"},
        {"shape": [-1]},
        {"shape": [2**62, 2**62]},
        {"block_bytes": -1},
        {"block_bytes": 1, "shape": [2**40]},
        {"offset_bytes": -4096},
        {"offset_bytes": 2**70},
        {"stamp": "ff"},
        {"shape": [2**62], "block_bytes": 4096},
    ],
)
def test_a_forged_header_is_refused(tmp_path, changes):
    path = forged(tmp_path / "file", **changes)
    handle = SwappedTensor(path, torch.float32, torch.Size([3]), 4096, None, "00")
    with pytest.raises(SwapCorruptedError):
        nvme.swap_in(handle)


def test_a_long_table_takes_no_memory(tmp_path):
    """One of 256 MiB, in a file that takes no space."""
    path = forged(tmp_path / "file", shape=[2**26], block_bytes=8, size=2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SwapCorruptedError, match="damaged"):
        SwappedTensor.from_file(path, torch.float32, 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize(
    "change",
    [
        {"offset_bytes": -4096},
        {"offset_bytes": 2**63},
        {"shape": torch.Size([2**40])},
        {"stamp": "another"},
        {"stamp": None, "offset_bytes": 2**62},
    ],
)
def test_a_changed_handle_is_refused(tmp_path, change):
    handle = dataclasses.replace(swap_out(torch.arange(3.0), tmp_path), **change)
    with pytest.raises(TransferError):
        nvme.swap_in(handle)


@pytest.mark.parametrize("table", [b"", b"12345678" * 2, b"1234567"])
def test_a_handle_with_a_forged_table_is_refused(tmp_path, table):
    swapped = swap_out(torch.arange(3.0), tmp_path)
    handle = dataclasses.replace(swapped, checksums=dataclasses.replace(swapped.checksums, table=table))
    with pytest.raises(SwapCorruptedError, match="another number of checksums"):
        nvme.swap_in(handle)


def test_a_pickled_handle_owns_nothing(tmp_path):
    swapped = swap_out(torch.arange(3.0), tmp_path)
    copy = pickle.loads(pickle.dumps(swapped))
    copy.delete()
    del copy
    assert nvme.swap_in(swapped).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "name", ["../../outside", "/etc/passwd", "..", "a\0b", "x" * 1000, "\udcff", "lock", "machine"]
)
def test_no_name_leads_out_of_the_directory(tmp_path, name):
    first, second = (swap_out(torch.full((3,), value), tmp_path / "root", name) for value in (1.0, 2.0))
    assert first.path.parent == second.path.parent
    assert first.path.parent.parent == tmp_path / "root"
    assert [nvme.swap_in(each).tolist() for each in (first, second)] == [[1, 1, 1], [2, 2, 2]]


def test_a_file_of_anothers_is_never_written_through_a_link(tmp_path):
    """The name of a new file cannot be known; where it is taken nevertheless, nothing is written."""
    (tmp_path / "mine").write_text("mine")
    swapped = swap_out(torch.arange(3.0), tmp_path)
    number = int(swapped.path.stem.split("-")[1])
    (swapped.path.parent / f"tensor-{number + 1}.part").symlink_to(tmp_path / "mine")
    with pytest.raises(SwapError):
        swap_out(torch.ones(3), tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
    assert swapped.path.parent.stat().st_mode & 0o777 == 0o700
    assert swapped.path.stat().st_mode & 0o777 == 0o600
