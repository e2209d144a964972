"""Files that are not what the handle says: damaged, replaced, changed, or of another program."""

import itertools
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.nvme.tools import CHUNK, device_copy, flip, make, patched, same_bits, swap_out, values
from transfer import (
    SwapCorruptedError,
    SwapError,
    SwapFileNotFoundError,
    SwappedTensor,
    TransferError,
    UnsupportedDtypeError,
    build_transfer,
    nvme,
)


@pytest.fixture
def raw(tmp_path):
    """A file of another program: 40,000 bytes of 0 to 250, over and over."""
    path = tmp_path / "theirs.bin"
    path.write_bytes(bytes(itertools.islice(itertools.cycle(range(251)), 40_000)))
    return path


def expected_floats(offset, numel):
    """What lies in the file of ``raw``, by the rule that wrote it."""
    data = bytes((offset + index) % 251 for index in range(4 * numel))
    return torch.tensor(struct.unpack(f"<{numel}f", data))


@pytest.mark.parametrize("offset", [0, 1, 3, 4, 512, 1000, 4095, 4096, 4097 * 4])
def test_a_foreign_file_from_any_offset(raw, any_accelerator, offset):
    for numel in (1, 129, 5000):
        swapped = SwappedTensor.from_file(raw, torch.float32, numel, offset_bytes=offset)
        assert same_bits(nvme.swap_in(swapped), expected_floats(offset, numel))
        for cast in ("device", "host"):
            with make(any_accelerator, cast=cast, chunk_elements=1024, request_bytes=4096) as transfer:
                assert same_bits(device_copy(transfer, swapped).cpu(), expected_floats(offset, numel))


def test_a_foreign_file_to_its_last_byte(raw):
    swapped = SwappedTensor.from_file(raw, torch.float32, 10_000)
    assert same_bits(nvme.swap_in(swapped), expected_floats(0, 10_000))
    last = SwappedTensor.from_file(raw, torch.uint8, (), offset_bytes=39_999)
    assert nvme.swap_in(last).item() == 39_999 % 251


@pytest.mark.parametrize(("numel", "offset"), [(10_001, 0), (10_000, 1), (1, 39_997), (1, 2**62), (2**40, 0)])
def test_a_foreign_file_that_is_too_short(raw, numel, offset):
    message = f"{4 * numel} bytes wanted from byte {offset} on, and it ends at byte 40000"
    with pytest.raises(SwapCorruptedError, match=message) as caught:
        SwappedTensor.from_file(raw, torch.float32, numel, offset_bytes=offset)
    assert caught.value.filename == str(raw)


def test_a_foreign_file_shortened_since(raw, any_accelerator):
    swapped = SwappedTensor.from_file(raw, torch.float32, 10_000)
    os.truncate(raw, 39_999)
    with pytest.raises(SwapCorruptedError, match="40000 bytes wanted.* ends at byte 39999"):
        nvme.swap_in(swapped)
    with make(any_accelerator) as transfer, pytest.raises(SwapCorruptedError, match="40000 bytes wanted"):
        device_copy(transfer, swapped)
    os.truncate(raw, 40_000)
    assert nvme.swap_in(swapped).shape == (10_000,)


@pytest.mark.parametrize("offset", [2**31 - 4, 2**32 + 4, 2**33 + 1])
def test_a_foreign_file_of_more_bytes_than_32_bits_count(tmp_path, any_accelerator, offset):
    path = tmp_path / "theirs.bin"
    with path.open("wb") as file:  # a file with a hole, which takes no space
        file.seek(offset)
        file.write(struct.pack("<1000f", *range(1000)))
    swapped = SwappedTensor.from_file(path, torch.float32, (10, 100), offset_bytes=offset)
    assert same_bits(nvme.swap_in(swapped), torch.arange(1000.0).view(10, 100))
    with make(any_accelerator) as transfer:
        assert same_bits(device_copy(transfer, swapped).cpu(), torch.arange(1000.0).view(10, 100))


def test_a_foreign_path_means_the_same_file_after_a_change_of_directory(raw, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swapped = SwappedTensor.from_file(raw.name, torch.uint8, 3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / raw.name).write_bytes(b"\xff" * 3)
    monkeypatch.chdir(elsewhere)
    assert nvme.swap_in(swapped).tolist() == [0, 1, 2]


def test_a_foreign_file_below_the_home_directory(raw, monkeypatch):
    monkeypatch.setenv("HOME", str(raw.parent))
    assert nvme.swap_in(SwappedTensor.from_file("~/theirs.bin", torch.uint8, 2)).tolist() == [0, 1]


@pytest.mark.parametrize("path", ["missing", "theirs.bin/x", "a\0b", "~nosuchuser/x", "/", "pipe", "loop", "x" * 300])
def test_what_is_no_file(raw, monkeypatch, path):
    monkeypatch.chdir(raw.parent)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    with pytest.raises(SwapError) as caught:
        SwappedTensor.from_file(path, torch.float32, 1)
    kind = {"missing": FileNotFoundError, "theirs.bin/x": NotADirectoryError}.get(path, OSError)
    assert isinstance(caught.value, kind)
    assert path in caught.value.filename


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "error"),
    [
        (torch.float32, -1, 0, ValueError),
        (torch.float32, (2, -1), 0, ValueError),
        (torch.float32, 1, -4, ValueError),
        (torch.float32, 1, 1.5, TypeError),
        (torch.float32, 2.5, 0, TypeError),
        (torch.quint8, 1, 0, UnsupportedDtypeError),
        ("float32", 1, 0, UnsupportedDtypeError),
        (float, 1, 0, UnsupportedDtypeError),
    ],
)
def test_arguments_that_mean_nothing(raw, dtype, shape, offset, error):
    with pytest.raises(error):
        SwappedTensor.from_file(raw, dtype, shape, offset)


def test_a_file_of_ours_taken_for_a_foreign_one(root):
    swapped = swap_out(torch.arange(2000.0), root)
    for offset in (0, 8, 4092):  # all before the values, which begin at 4096
        with pytest.raises(SwapCorruptedError, match=r"begins? with a header.*offset_bytes"):
            SwappedTensor.from_file(swapped.path, torch.float32, 3, offset)
    by_hand = SwappedTensor.from_file(swapped.path, torch.float32, 3, swapped.offset_bytes + 4)
    assert nvme.swap_in(by_hand).tolist() == [1, 2, 3]


def refused(swapped, accelerator, match):
    """Checks that neither ``swap_in`` nor a transfer reads a file, and that the transfer works on."""
    with pytest.raises(SwapCorruptedError, match=match) as caught:
        nvme.swap_in(swapped)
    assert caught.value.filename == str(swapped.path)
    assert isinstance(caught.value, OSError | ValueError)
    assert isinstance(caught.value, TransferError)
    destination = accelerator.device_empty(*swapped.shape, dtype=swapped.dtype)
    destination.fill_(-1)
    with make(accelerator) as transfer:
        with pytest.raises(SwapCorruptedError, match=match):
            transfer.copy(destination, swapped)
        assert (destination == -1).all()
        other = swap_out(torch.ones(3), swapped.path.parents[1])
        assert device_copy(transfer, other).tolist() == [1, 1, 1]


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
def test_a_file_of_another_length(root, simulated, checksums, change):
    swapped = swap_out(torch.arange(2000.0), root, checksums=checksums)
    size = swapped.path.stat().st_size
    os.truncate(swapped.path, size + change)
    refused(swapped, simulated, f"{size + change}")


@pytest.mark.parametrize("size", [0, 1, 16, 38, 100, 4095, 4096])
def test_a_file_of_which_little_is_left_names_both_sizes(root, simulated, size):
    swapped = swap_out(torch.arange(2000.0), root)  # 4096 bytes of header, 8000 of values, 192 of padding
    os.truncate(swapped.path, size)
    refused(swapped, simulated, f"cannot be trusted: it was written with 12288 bytes and now has {size}")


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize(
    "other", [torch.arange(2000.0), torch.arange(2000.0) + 1, torch.zeros(2000, dtype=torch.int32), torch.zeros(3)]
)
def test_another_swap_file_in_its_place(root, simulated, checksums, other):
    swapped = swap_out(torch.arange(2000.0), root, checksums=checksums)
    usurper = swap_out(other, root, checksums=checksums)
    usurper.path.rename(swapped.path)
    refused(swapped, simulated, "another file has taken its place")


@pytest.mark.parametrize("content", [b"", b"\0" * 12_288, b"H2DSWAP\n" + b"\xff" * 12_280, b"H2DSWAP\n"])
def test_something_else_in_its_place(root, simulated, content):
    swapped = swap_out(torch.arange(2000.0), root)
    swapped.path.write_bytes(content)
    refused(swapped, simulated, "cannot be trusted")


@pytest.mark.parametrize("shape", [(1000, 2), (2000, 1), (1999,), (2,)])
def test_a_handle_of_another_shape(root, simulated, shape):
    import dataclasses

    swapped = swap_out(torch.arange(2000.0), root)
    refused(dataclasses.replace(swapped, shape=torch.Size(shape), _owned=None), simulated, r"\(2000,\)")


def test_a_handle_of_another_dtype(root, simulated):
    import dataclasses

    swapped = swap_out(torch.arange(2000.0), root)
    refused(dataclasses.replace(swapped, dtype=torch.int32, _owned=None), simulated, "float32.*int32")


@pytest.mark.parametrize(
    "description",
    [
        b'{"dtype": "float32", "shape": [4611686018427387904], "offset_bytes": 0, "block_bytes": 4096, "stamp": "a"}',
        b'{"dtype": "float32", "shape": [-4611686018427387904], "offset_bytes": 0, "block_bytes": 1, "stamp": "a"}',
        b'{"dtype": "float32", "shape": [9223372036854775807, 99], "offset_bytes": 0, "block_bytes": 1, "stamp": "a"}',
        b'{"dtype": "float32", "shape": [99], "offset_bytes": 0, "block_bytes": -1, "stamp": "a"}',
        b'{"dtype": "load", "shape": [1], "offset_bytes": 0, "block_bytes": 1, "stamp": "a"}',
        b'{"dtype": "nothing", "shape": [1], "offset_bytes": 0, "block_bytes": 1, "stamp": "a"}',
        b'{"dtype": "float32", "shape": [99999999999999999999999], "offset_bytes": 0, "block_bytes": 1, "stamp": "a"}',
        b"[]",
        b"\xff\xfe",
    ],
)
def test_a_description_that_asks_for_too_much(root, description):
    swapped = swap_out(torch.arange(2000.0), root)
    with swapped.path.open("r+b") as file:
        file.write(struct.pack("<8sII", b"H2DSWAP\n", 1, len(description)) + description)
    with pytest.raises(SwapCorruptedError, match="header is damaged"):
        nvme.swap_in(swapped)


def test_a_format_of_the_future(root, simulated):
    swapped = swap_out(torch.arange(2000.0), root)
    with swapped.path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 2))
    refused(swapped, simulated, "version 2")


# 10,000 values in blocks of 4096 bytes: header and table take the first page, the values the next ten.
FILE_BYTES, VALUE_BYTES = 4096 + 40_960, 40_000
positions = st.one_of(
    st.integers(0, 400),  # header and table
    st.integers(4096, 4096 + VALUE_BYTES - 1),
    st.integers(0, FILE_BYTES - 1),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(byte=positions, bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed_or_harmless(root, byte, bit):
    tensor = torch.arange(10_000.0)
    swapped = _kept(root, tensor)
    assert swapped.path.stat().st_size == FILE_BYTES
    flip(swapped.path, byte, bit)
    try:
        back = nvme.swap_in(swapped, threads=1)
    except SwapCorruptedError:
        caught = True
    else:
        assert same_bits(back, tensor), "never a wrong value"
        caught = False
    finally:
        flip(swapped.path, byte, bit)
    assert caught or not 4096 <= byte < 4096 + VALUE_BYTES
    assert caught or byte > 150, "the description is covered"


def _kept(root, tensor, files={}):  # noqa: B006 - one file for all examples of a test
    if root not in files:
        files.clear()
        files[root] = swap_out(tensor, root, checksum_bytes=4096)
    return files[root]


@pytest.mark.parametrize("cast", ["device", "host"])
def test_a_damaged_block_late_in_the_file(root, any_accelerator, cast):
    """Each element is its old or its own new value, and what is damaged stays old."""
    tensor = torch.arange(CHUNK * 6.0)
    swapped = swap_out(tensor, root)
    flip(swapped.path, swapped.offset_bytes + 4 * (CHUNK * 4 + 17), 3)
    destination = any_accelerator.device_empty(CHUNK * 6, dtype=torch.float32)
    destination.fill_(-1)
    with make(any_accelerator, cast=cast) as transfer:
        byte = 4 * CHUNK * 4
        with pytest.raises(SwapCorruptedError, match=f"from byte {byte} on are not those that were written"):
            transfer.copy(destination, swapped)
        now = destination.cpu()
        assert ((now == -1) | (now == tensor)).all()
        assert (now[CHUNK * 4 :] == -1).all()
        flip(swapped.path, swapped.offset_bytes + 4 * (CHUNK * 4 + 17), 3)
        assert torch.equal(device_copy(transfer, swapped).cpu(), tensor)


def test_without_checksums_nothing_is_compared(root, any_accelerator):
    """What it means to switch them off: in the file, for a copy, or for swap_in."""
    tensor = torch.zeros(2000)
    with_sums, without = swap_out(tensor, root), swap_out(tensor, root, checksums=False)
    for swapped in (with_sums, without):
        flip(swapped.path, swapped.offset_bytes + 4 * 1000 + 3, 6)  # 0.0 becomes 2.0
        assert nvme.swap_in(swapped, checksums=False)[1000] == 2
        with make(any_accelerator, checksums=False) as transfer:
            assert device_copy(transfer, swapped)[1000] == 2
    assert nvme.swap_in(without)[1000] == 2
    with pytest.raises(SwapCorruptedError):
        nvme.swap_in(with_sums)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_file_changed_while_the_copy_runs(root, simulated, checksums):
    """By the first read, for what the later ones read."""
    tensor = torch.zeros(CHUNK * 6)
    swapped = swap_out(tensor, root)
    changed = []

    def change(preadv, descriptor, buffers, offset):
        if not changed:
            changed.append(1)
            flip(swapped.path, swapped.offset_bytes + 4 * (CHUNK * 5) + 3, 6)
        return preadv(descriptor, buffers, offset)

    with make(simulated, checksums=checksums, buffers=2, threads=1) as transfer, patched("preadv", change):
        if checksums:
            with pytest.raises(SwapCorruptedError, match=f"byte {4 * CHUNK * 5}"):
                device_copy(transfer, swapped)
        else:
            assert device_copy(transfer, swapped)[CHUNK * 5] == 2
    assert changed


@pytest.mark.parametrize("size", [0, 4096, 8192 + 4 * CHUNK * 3 + 1000])
def test_a_file_cut_off_while_the_copy_runs(root, simulated, size):
    swapped = swap_out(torch.ones(CHUNK * 6), root)
    enqueue = simulated.enqueue_copy

    def cut(destination, source):
        os.truncate(swapped.path, size)
        enqueue(destination, source)

    simulated.enqueue_copy = cut
    message = r"the file ended while it was read: \d+ bytes wanted from byte \d+ on, \d+ got: "
    with make(simulated, buffers=2, threads=1) as transfer, pytest.raises(SwapCorruptedError, match=message):
        device_copy(transfer, swapped)
    assert simulated.pinned_bytes == 0


def test_a_file_replaced_while_the_copy_runs_is_read_to_its_end(root, simulated):
    tensor = torch.arange(CHUNK * 6.0)
    swapped, other = swap_out(tensor, root), swap_out(tensor + 1, root)
    enqueue, path = simulated.enqueue_copy, other.path

    def replace(destination, source):
        if path.exists():
            path.rename(swapped.path)
        enqueue(destination, source)

    simulated.enqueue_copy = replace
    with make(simulated, buffers=2, threads=1) as transfer:
        assert torch.equal(device_copy(transfer, swapped), tensor)
    assert not path.exists()


@pytest.mark.parametrize("cast", ["device", "host"])
@pytest.mark.parametrize(
    ("source", "dtype", "checksum_bytes"),
    [
        (torch.float32, torch.float32, 2**14),
        (torch.float32, torch.bfloat16, 2**25),
        (torch.bfloat16, torch.float32, 2**13),
        (torch.float8_e5m2, torch.float64, 3 * 2**12),
        (torch.float64, torch.float16, 3 * 2**12),
    ],
)
def test_checksums_that_cover_more_than_a_chunk(root, simulated, cast, source, dtype, checksum_bytes):
    """Whatever a file was written with, chunks of any size read it, and use nothing before it was checked."""
    tensor = torch.arange(50_003).remainder(57).to(source)
    swapped = swap_out(tensor, root, checksum_bytes=checksum_bytes)
    with make(simulated, chunk_elements=2000, cast=cast) as transfer:
        assert same_bits(device_copy(transfer, swapped, dtype), tensor.to(dtype))
        byte = 40_000 * source.itemsize
        flip(swapped.path, swapped.offset_bytes + byte, 0)
        destination = simulated.device_empty(50_003, dtype=dtype)
        destination.fill_(58)
        begin = byte // checksum_bytes * checksum_bytes
        with pytest.raises(SwapCorruptedError, match=f"from byte {begin} on are not those that were written"):
            transfer.copy(destination, swapped)
        assert (destination.float()[begin // source.itemsize :] == 58).all()


def test_small_chunks_read_what_swap_out_writes_by_default(root, any_accelerator):
    tensor = torch.arange(3_000_000.0)
    swapped = nvme.swap_out(tensor, root)
    with build_transfer({"nvme_swapped": {"chunk_elements": 2**18}}, any_accelerator) as transfer:
        destination = any_accelerator.device_empty(3_000_000, dtype=torch.float32)
        transfer.copy(destination, swapped)
        assert same_bits(destination.cpu(), tensor)


def test_a_header_is_read_whole_whatever_a_system_gives_at_a_time(root):
    swapped = swap_out(torch.arange(1000.0), root)
    with patched("pread", lambda pread, descriptor, length, offset: pread(descriptor, max(1, length // 2), offset)):
        assert nvme.swap_in(swapped).tolist() == [*range(1000)]
        with pytest.raises(SwapCorruptedError, match="begins with a header"):
            SwappedTensor.from_file(swapped.path, torch.float32, 1000)


def test_a_deleted_file(root, any_accelerator):
    swapped = swap_out(values(2000), root)
    kept = swap_out(torch.ones(3), root)
    swapped.path.unlink()
    with make(any_accelerator) as transfer:
        with pytest.raises(SwapFileNotFoundError) as caught:
            device_copy(transfer, swapped)
        assert caught.value.filename == str(swapped.path)
        assert device_copy(transfer, kept).tolist() == [1, 1, 1]
    swapped.delete()
