"""Round trips: the bits that come back are those that were swapped out, of any tensor, whichever way they go."""

import contextlib
import copy
import gc
import itertools
import pickle
from pathlib import Path

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from tests.nvme.tools import CHUNK, device_copy, files_below, make, patched, same_bits, swap_out, values
from transfer import (
    InvalidTensorError,
    NotATensorError,
    NvmeSwappedConfig,
    SwapFileNotFoundError,
    TransferBusyError,
    UnsupportedDtypeError,
    build_transfer,
    nvme,
)

SIZES = [0, 1, 127, 128, 129, 1000, 262_145, 300_000]

TENSORS = {
    "odd bfloat16": lambda: values(1001, torch.bfloat16),
    "int64": lambda: values(777, torch.int64),
    "uint16": lambda: values(777, torch.uint16),
    "bool": lambda: values(1003, torch.bool),
    "complex64": lambda: values(513, torch.complex64),
    "complex128": lambda: values(257, torch.complex128),
    "float64": lambda: values(65_537, torch.float64),
    "fp8": lambda: values(4097, torch.float8_e4m3fn),
    "fp8 e5m2": lambda: values(5, torch.float8_e5m2),
    "transposed": lambda: values(12_000).view(100, 120).t(),
    "strided": lambda: values(9001)[1::3],
    "expanded": lambda: values(1).expand(4, 5),
    "0-dim": lambda: torch.tensor(2.5),
    "one of several": lambda: torch.arange(4.0)[2::4],
    "one, of any strides": lambda: values(9).as_strided((1, 1), (7, 3), 2),
    "a column": lambda: values(12).as_strided((4, 1), (3, 5)),
    "requires grad": lambda: torch.arange(300.0, requires_grad=True),
    "part of a graph": lambda: torch.arange(300.0, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.arange(30.0)),
    "offset view": lambda: values(5000)[1237:4001],
    "empty, with a shape": lambda: torch.empty(3, 0, 8),
    "empty view": lambda: values(10)[5:5],
    "conjugated": lambda: torch.complex(torch.arange(500.0), torch.arange(500.0) + 1).conj(),
    "negated": lambda: torch.complex(torch.arange(500.0), torch.arange(500.0) + 1).conj().imag,
    "conjugated and transposed": lambda: torch.complex(torch.ones(3, 5), torch.arange(15.0).view(3, 5)).conj().t(),
}


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("checksums", [True, False])
def test_round_trip_of_a_size(root, numel, checksums):
    tensor = values(numel)
    swapped = swap_out(tensor, root, checksums=checksums)
    assert (swapped.dtype, swapped.shape, swapped.nbytes) == (torch.float32, (numel,), numel * 4)
    assert numel == 0 or swapped.path.stat().st_size >= numel * 4
    assert same_bits(nvme.swap_in(swapped), tensor)


@pytest.mark.parametrize("kind", TENSORS)
def test_round_trip_of_a_kind(root, kind):
    tensor = TENSORS[kind]()
    back = nvme.swap_in(swap_out(tensor, root))
    assert same_bits(back, tensor)
    assert back.is_contiguous()
    assert not back.requires_grad


def test_the_conjugate_is_swapped_out_not_what_lies_below_it(root):
    below = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    assert nvme.swap_in(swap_out(below.conj(), root)).tolist() == [1 - 3j, 2 - 4j]
    assert nvme.swap_in(swap_out(below.conj().imag, root)).tolist() == [-3, -4]


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        ([1.0, 2.0], NotATensorError),
        (None, NotATensorError),
        (torch.empty(3, device="meta"), InvalidTensorError),
        (torch.eye(3).to_sparse(), InvalidTensorError),
        (torch.empty(3, dtype=torch.uint4), UnsupportedDtypeError),
        (torch.empty(3, dtype=torch.bits8), UnsupportedDtypeError),
    ],
    ids=["list", "None", "meta", "sparse", "uint4", "bits8"],
)
def test_what_has_no_plain_values_is_refused_and_leaves_nothing(root, tensor, error):
    with pytest.raises(error):
        swap_out(tensor, root)
    assert not files_below(root)


@pytest.mark.parametrize("options", [{"threads": 0}, *({"checksum_bytes": size} for size in (0, 1000, -4096))])
def test_bad_options_are_refused(root, options):
    with pytest.raises(ValueError, match="threads .* checksum_bytes"):
        swap_out(torch.ones(3), root, **options)


@pytest.mark.parametrize("checksum_bytes", [4096, 3 * 4096, 2**22])
@pytest.mark.parametrize("threads", [1, 8])
def test_any_block_and_number_of_threads(root, checksum_bytes, threads):
    tensor = values(1_200_001)  # more than a piece of each
    swapped = swap_out(tensor, root, checksum_bytes=checksum_bytes, threads=threads)
    assert same_bits(nvme.swap_in(swapped, threads=threads), tensor)


def test_the_file_appears_when_it_is_safe(root):
    """Its bytes are on the drive before it has its name, and the name is before swap_out returns."""
    swap_out(torch.ones(3), root).delete()
    calls = []

    def synced(fsync, descriptor):
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().suffix))
        fsync(descriptor)

    def written(pwrite, descriptor, *rest):
        calls.append(("pwrite", Path(f"/proc/self/fd/{descriptor}").readlink().suffix))
        return pwrite(descriptor, *rest)

    def renamed(rename, *paths):
        calls.append(("rename", Path(paths[1]).suffix))
        rename(*paths)

    with patched("fsync", synced), patched("rename", renamed), patched("pwrite", written):
        swapped = swap_out(torch.ones(100), root)
    assert calls[-3:] == [("fsync", ".part"), ("rename", ".swap"), ("fsync", swapped.path.parent.suffix)]
    assert set(calls[:-3]) == {("pwrite", ".part")}


def test_the_end_of_a_file_holds_zeros_and_not_what_memory_held(root):
    numel = 2**20 * 3 + 100  # three pieces and a bit, by one thread
    swapped = swap_out(torch.full((numel,), -1, dtype=torch.int32), root, threads=1)
    content = swapped.path.read_bytes()
    end = swapped.offset_bytes + 4 * numel
    assert len(content) == swapped.offset_bytes + 4 * 2**20 * 3 + 4096
    assert content[swapped.offset_bytes : end] == b"\xff" * 4 * numel
    assert content[end:] == bytes(4096 - 400)


@pytest.mark.parametrize("numel", SIZES)
def test_a_file_reaches_the_device(root, any_accelerator, numel):
    tensor = torch.linspace(-70_000, 70_000, numel)
    swapped = swap_out(tensor, root)
    for cast in ("device", "host"):
        with make(any_accelerator, cast=cast) as transfer:
            for dtype in (torch.bfloat16, torch.float32):
                assert same_bits(device_copy(transfer, swapped, dtype).cpu(), tensor.to(dtype))


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.int64, torch.int64),
        (torch.complex64, torch.complex64),
        (torch.bool, torch.bool),
    ],
)
def test_dtypes_and_buffers(root, any_accelerator, source, dtype):
    tensor = torch.arange(100_003).remainder(251).to(source)
    swapped = swap_out(tensor, root, checksum_bytes=4096)
    for cast, buffers in itertools.product(("device", "host"), (1, 4)):
        with make(any_accelerator, cast=cast, buffers=buffers, chunk_elements=5000) as transfer:
            assert same_bits(device_copy(transfer, swapped, dtype).cpu(), tensor.to(dtype)), (cast, buffers)


@pytest.mark.parametrize("cast", ["device", "host"])
def test_a_strided_destination_and_nothing_beside_it(root, any_accelerator, cast):
    swapped = swap_out(torch.arange(30_000.0), root, checksum_bytes=4096)
    parent = any_accelerator.device_empty(60_000, dtype=torch.bfloat16)
    parent.fill_(-1)
    with make(any_accelerator, cast=cast, chunk_elements=2048) as transfer:
        transfer.copy(parent[::2], swapped)
    assert (parent[1::2] == -1).all()
    assert same_bits(parent[::2].cpu(), torch.arange(30_000.0).bfloat16())


@pytest.mark.parametrize("numel", [1, 1000, 262_145])
def test_padding_never_reaches_the_destination(root, any_accelerator, numel):
    swapped = swap_out(torch.full((numel,), 7.0), root)
    parent = any_accelerator.device_empty(numel + 4, dtype=torch.float32)
    for cast in ("device", "host"):
        parent.fill_(-1)
        with make(any_accelerator, cast=cast) as transfer:
            transfer.copy(parent[:numel], swapped)
        assert parent.tolist() == [7.0] * numel + [-1.0] * 4


def test_a_host_destination(root, any_accelerator):
    swapped = swap_out(torch.arange(200_000.0), root)
    destination = torch.full((200_000,), -1.0)
    with make(any_accelerator) as transfer:
        transfer.copy(destination, swapped)
        assert transfer.pinned_bytes == 0
    assert same_bits(destination, torch.arange(200_000.0))


def test_small_files_after_large_ones_bring_no_stale_bytes(root, simulated):
    large, small = swap_out(torch.full((300_000,), 9.0), root), swap_out(torch.full((3,), 1.0), root)
    with make(simulated) as transfer:
        device_copy(transfer, large)
        assert device_copy(transfer, small).tolist() == [1.0] * 3


def test_the_handle_tells_an_empty_file_from_none(root):
    swapped = swap_out(torch.empty(0, 5), root)
    assert not swapped.path.exists()
    assert nvme.swap_in(pickle.loads(pickle.dumps(swapped))).shape == (0, 5)
    swapped.delete()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_a_copied_handle_keeps_the_file(root, again):
    """As of a state dict that is copied, whose original goes."""
    tensor = values(5000)
    swapped = swap_out(tensor, root)
    other = again({"master": swapped})["master"]
    del swapped
    gc.collect()
    assert same_bits(nvme.swap_in(other), tensor)
    path = other.path
    del other
    gc.collect()
    assert not path.exists()


@pytest.mark.parametrize("again", [lambda swapped: pickle.loads(pickle.dumps(swapped))])
def test_a_pickled_handle_reads_and_owns_nothing(root, again):
    tensor = values(5000)
    swapped = swap_out(tensor, root)
    other = again(swapped)
    assert other == swapped
    other.delete()
    del other
    assert same_bits(nvme.swap_in(again(swapped)), tensor)
    other, path = again(swapped), swapped.path
    del swapped
    assert not path.exists()
    with pytest.raises(SwapFileNotFoundError) as caught:
        nvme.swap_in(other)
    assert caught.value.filename == str(path)
    assert isinstance(caught.value, FileNotFoundError)


def test_delete_twice(root):
    swapped = swap_out(torch.ones(5), root)
    swapped.delete()
    swapped.delete()
    assert not swapped.path.exists()


def test_swap_out_through_a_transfer(root, any_accelerator):
    with make(any_accelerator, path=str(root), checksums=False) as transfer:
        swapped = transfer.swap_out(torch.arange(5.0), "layer.0")
        assert swapped.checksums is None
        assert "layer.0" in swapped.path.name
        assert device_copy(transfer, swapped).tolist() == [0, 1, 2, 3, 4]


def test_a_transfer_that_build_transfer_returns_reads_files(root, any_accelerator):
    swapped = swap_out(torch.arange(5.0), root)
    with build_transfer({}, any_accelerator) as transfer:
        assert device_copy(transfer, swapped, torch.bfloat16).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("chunk", [1, 1000, 65_536])
@pytest.mark.parametrize("buffers", [1, 4])
def test_memory_is_what_the_configuration_says(root, chunk, buffers):
    simulated = SimulatedAccelerator()
    config = NvmeSwappedConfig(chunk_elements=chunk, buffers=buffers)
    chunk_bytes = {1: 4096, 1000: 4096, 65_536: 262_144}[chunk]
    assert (config.pinned_bytes, config.scratch_bytes) == (chunk_bytes * buffers, chunk_bytes * 2)
    swapped = swap_out(torch.ones(100_000), root, checksum_bytes=4096)
    transfer = make(simulated, chunk_elements=chunk, buffers=buffers)
    assert transfer.pinned_bytes == transfer.scratch_bytes == 0
    for _ in range(3):
        device_copy(transfer, swapped, torch.bfloat16)
        assert transfer.pinned_bytes == simulated.pinned_bytes == config.pinned_bytes
        assert transfer.scratch_bytes == config.scratch_bytes
    transfer.close()
    transfer.close()
    assert transfer.pinned_bytes == transfer.scratch_bytes == simulated.pinned_bytes == 0
    assert device_copy(transfer, swapped).tolist() == [1.0] * 100_000
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_no_copy_waits_for_pageable_memory_or_casts_on_its_way(root, simulated):
    """With ``cast: device`` the bytes are copied as they are, out of pinned memory, and many are in flight."""
    swapped = swap_out(torch.ones(CHUNK * 4), root)
    crossings = []
    enqueue = simulated.enqueue_copy

    def recorded(destination, source):
        if simulated.on_host(source):
            crossings.append((source.dtype == destination.dtype, simulated.is_pinned(source)))
        enqueue(destination, source)

    simulated.enqueue_copy = recorded
    transfer = make(simulated)
    copied = transfer.submit(simulated.device_empty(CHUNK * 4, dtype=torch.bfloat16), swapped)
    assert not copied.done
    copied.wait()
    transfer.close()
    assert crossings
    assert set(crossings) == {(True, True)}


def test_a_copy_inside_a_copy(root, simulated):
    """Such as by a signal handler: it is refused, and neither spoils the other."""
    first = swap_out(torch.arange(CHUNK * 3.0), root)
    second = swap_out(torch.arange(CHUNK * 3.0) + 1, root)
    inner = simulated.device_empty(CHUNK * 3, dtype=torch.float32)
    transfer = make(simulated)
    enqueue, entered = simulated.enqueue_copy, []

    def enter(destination, source):
        if not entered:
            entered.append(1)
            with pytest.raises(TransferBusyError):
                transfer.copy(inner, second)
        enqueue(destination, source)

    simulated.enqueue_copy = enter
    outer = device_copy(transfer, first)
    assert entered
    assert torch.equal(outer, torch.arange(CHUNK * 3.0))
    transfer.copy(inner, second)
    assert torch.equal(inner, torch.arange(CHUNK * 3.0) + 1)
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_a_close_inside_a_copy(root, simulated):
    """Such as by a signal handler: it is done when the copy is."""
    swapped = swap_out(torch.arange(CHUNK * 5.0), root)
    transfer = make(simulated, buffers=2)
    enqueue = simulated.enqueue_copy
    simulated.enqueue_copy = lambda *tensors: (transfer.close(), enqueue(*tensors))
    assert torch.equal(device_copy(transfer, swapped), torch.arange(CHUNK * 5.0))
    assert transfer.pinned_bytes == transfer.scratch_bytes == simulated.pinned_bytes == 0
    simulated.enqueue_copy = enqueue
    assert torch.equal(device_copy(transfer, swapped), torch.arange(CHUNK * 5.0))
    transfer.close()


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta"), torch.no_grad])
@pytest.mark.parametrize("cast", ["device", "host"])
def test_modes_of_torch(root, any_accelerator, mode, cast):
    """What is made in one serves outside it, and no default device is where files are read to."""
    tensor = torch.arange(CHUNK * 3.0)
    destination = any_accelerator.device_empty(CHUNK * 3, dtype=torch.bfloat16)
    with make(any_accelerator, cast=cast) as transfer:
        with mode():
            swapped = swap_out(tensor, root)
            transfer.copy(destination, swapped)
            back, empty = nvme.swap_in(swapped), nvme.swap_in(swap_out(tensor[:0], root))
        assert same_bits(destination.cpu(), tensor.bfloat16())
        assert same_bits(back, tensor)
        assert empty.device.type == "cpu"
        back.add_(1)
        destination.fill_(0)
        transfer.copy(destination, swapped)
        assert same_bits(destination.cpu(), tensor.bfloat16())


def test_the_next_copy_is_right_after_an_error_of_the_accelerator(root, simulated):
    swapped = swap_out(torch.arange(CHUNK * 5.0), root)
    transfer = make(simulated)
    for method in ("enqueue_copy", "Event.record", "Event.synchronize"):
        for after in range(0, 8, 3):
            error = RuntimeError("lost device")
            with failing(simulated, method, error, after=after) as calls, contextlib.suppress(RuntimeError):
                device_copy(transfer, swapped)
                assert len(calls) <= after
            assert torch.equal(device_copy(transfer, swapped), torch.arange(CHUNK * 5.0))
    transfer.close()
    assert simulated.pinned_bytes == 0
