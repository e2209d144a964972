"""What ``pinned_direct`` registers, queues and holds, seen from the accelerator."""

import contextlib
import dataclasses
import gc
import itertools
import threading
import warnings

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from transfer import (
    FallbackWarning,
    PinnedDirectConfig,
    PinnedDirectTransfer,
    StrategyUnavailableError,
    build_transfer,
)
from transfer.scratch_lanes import ScratchLanes

BF16 = torch.bfloat16
MODES = pytest.mark.parametrize("mapped", [False, True], ids=["chunks", "mapped"])


class Recorder:
    """Notes each copy that is queued on an accelerator and each registration; refuses large ones if told to."""

    def __init__(self, accelerator, most_bytes=None, answer=None):
        self.copies, self.registered, self.unregistered, self.refused = [], [], [], 0
        enqueue, register, unregister = (
            accelerator.enqueue_copy,
            accelerator.register_host_memory,
            accelerator.unregister_host_memory,
        )

        def recording_copy(destination, source):
            from_host = accelerator.on_host(source)
            self.copies.append((from_host, source.numel(), destination.dtype, source.dtype, source.data_ptr()))
            assert not from_host or accelerator.is_pinned(source), "a chunk that no single registration holds"
            enqueue(destination, source)

        def recording_register(address, num_bytes):
            if most_bytes is not None and num_bytes > most_bytes:
                self.refused += 1
                if answer is None:
                    raise RuntimeError("out of locked memory")
                return answer
            self.registered.append((address, num_bytes))
            return register(address, num_bytes)

        def recording_unregister(address):
            unregister(address)
            self.unregistered.append(address)

        accelerator.enqueue_copy = recording_copy
        accelerator.register_host_memory = recording_register
        accelerator.unregister_host_memory = recording_unregister

    @property
    def from_host(self):
        return [copy[1:4] for copy in self.copies if copy[0]]


def direct(accelerator, **options):
    """In chunks unless it is told otherwise, and an error where another strategy would stand in."""
    return PinnedDirectTransfer(accelerator=accelerator, **{"mapped": False, "fallback": False, **options})


def empty(accelerator, *size, dtype=BF16):
    return accelerator.device_empty(*size, dtype=dtype).fill_(-1)


def test_each_chunk_crosses_uncast_and_pinned_into_scratch_of_the_configured_size(simulated, monkeypatch):
    recorder = Recorder(simulated)
    transfer = direct(simulated, chunk_elements=1000, buffers=3)
    source, destination = torch.arange(10_500.0), empty(simulated, 10_500)
    transfer.prepare(source)
    allocated = []
    for name in ("empty", "empty_like", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, make=make, **kw: allocated.append(size) or make(*size, **kw))
    transfer.copy(destination, source)
    assert sorted(numel for numel, *_ in recorder.from_host) == [500] + [1000] * 10
    assert {(to, of) for _, to, of in recorder.from_host} == {(torch.float32, torch.float32)}
    # (1,): validation asks torch once for each pair of dtypes.
    assert [size for size in allocated if size != (1,)] == [((1000,),)] * 3, (
        "three scratch buffers, and nothing of the partition's size"
    )
    assert (
        transfer.scratch_bytes
        == 3 * 1000 * 4
        == PinnedDirectConfig(chunk_elements=1000, buffers=3).scratch_bytes(torch.float32)
    )
    assert transfer.page_locked_bytes == transfer.pinned_bytes == simulated.pinned_bytes == 42_000
    assert torch.equal(destination, torch.arange(10_500.0).bfloat16())
    transfer.close()
    assert transfer.scratch_bytes == transfer.pinned_bytes == simulated.pinned_bytes == 0


def test_scratch_is_per_source_dtype_and_does_not_grow(simulated):
    with direct(simulated, chunk_elements=100) as transfer:
        for dtype, held in ((torch.float32, 800), (torch.float16, 800 + 400), (torch.float32, 1200)):
            for numel in (1, 99, 101, 5000):
                source = torch.ones(numel, dtype=dtype)
                transfer.prepare(source)
                transfer.copy(empty(simulated, numel), source)
                assert transfer.scratch_bytes == held


def test_a_copy_without_a_cast_takes_no_scratch(simulated):
    recorder = Recorder(simulated)
    with direct(simulated, chunk_elements=4) as transfer:
        source, destination = torch.arange(10.0), empty(simulated, 10, dtype=torch.float32)
        transfer.prepare(source)
        transfer.copy(destination, source)
        assert transfer.scratch_bytes == 0
    assert sorted(numel for numel, *_ in recorder.from_host) == [2, 4, 4]
    assert len(recorder.copies) == 3
    assert destination.tolist() == list(range(10))


def test_mapped_is_one_piece_without_scratch(simulated):
    recorder = Recorder(simulated)
    with direct(simulated, chunk_elements=4, mapped=True) as transfer:
        source, destination = torch.arange(100.0), empty(simulated, 100)
        transfer.prepare(source)
        transfer.submit(destination, source).wait()
        assert transfer.scratch_bytes == 0
        assert transfer.stats()["pinned_direct"].pieces == 1
    assert [copy[1:4] for copy in recorder.copies] == [(100, BF16, torch.float32)]
    assert torch.equal(destination, torch.arange(100.0).bfloat16())


def test_an_accelerator_that_does_not_map_gets_chunks():
    simulated = SimulatedAccelerator(maps_host_memory=False)
    with direct(simulated, chunk_elements=4, mapped=True) as transfer:
        source, destination = torch.arange(10.0), empty(simulated, 10)
        transfer.prepare(source)
        transfer.copy(destination, source)
        assert transfer.stats()["pinned_direct"].pieces == 3
        assert transfer.scratch_bytes == 2 * 4 * 4
    assert destination.tolist() == list(range(10))


def two_back_to_back(seed, chunk, mapped=False):
    """Two destinations, after two submits from different sources without a wait between them."""
    simulated = SimulatedAccelerator(seed)
    with direct(simulated, chunk_elements=chunk, mapped=mapped) as transfer:
        sources = [torch.arange(10.0), torch.arange(10.0) + 100]
        destinations = [empty(simulated, 10) for _ in sources]
        for source in sources:
            transfer.prepare(source)
        copies = [transfer.submit(*pair) for pair in zip(destinations, sources, strict=True)]
        for copy in copies[:: 1 if seed % 2 else -1]:
            copy.wait()
        return [destination.tolist() for destination in destinations]


@pytest.mark.parametrize("chunk", [1, 3, 5, 9, 10, 64])
def test_two_submits_share_the_scratch_safely(chunk):
    """The guard of a scratch buffer belongs to the buffer, whichever copy used it last (limits.md's race)."""
    expected = [list(range(10)), [100 + index for index in range(10)]]  # all exact in bf16
    for seed in range(40):
        assert two_back_to_back(seed, chunk) == expected
        assert two_back_to_back(seed, chunk, mapped=True) == expected


@pytest.mark.parametrize("chunk", [1, 3, 5, 9, 10])
def test_the_simulated_accelerator_notices_scratch_that_is_guarded_per_submit(monkeypatch, chunk):
    """That the test before can fail: lanes whose buffers outlive the stream that orders them."""
    cross = ScratchLanes.cross

    def careless(lanes, *arguments):
        for lane in lanes._lanes:
            lane.stream = lanes._accelerator.Stream()
        return cross(lanes, *arguments)

    monkeypatch.setattr(ScratchLanes, "cross", careless)
    expected = [list(range(10)), [100 + index for index in range(10)]]
    assert all(two_back_to_back(seed, chunk) != expected for seed in range(20))


@pytest.mark.parametrize("seed", range(10))
def test_many_submits_from_several_streams(seed):
    simulated = SimulatedAccelerator(seed)
    streams = [simulated.Stream() for _ in range(3)]
    with direct(simulated, chunk_elements=4, buffers=3) as transfer:
        copies = []
        for value in range(12):
            source, destination = torch.arange(10.0) + 10 * value, empty(simulated, 10)
            transfer.prepare(source)
            with simulated.stream(streams[value % 3]):
                copies.append((transfer.submit(destination, source), destination, value))
        for copy, destination, value in copies[::-1]:
            copy.wait()
            assert destination.tolist() == [10 * value + index for index in range(10)]


@MODES
def test_the_source_is_read_until_release_source_and_not_after(simulated, mapped):
    with direct(simulated, chunk_elements=3, mapped=mapped) as transfer:
        source, destination = torch.arange(10.0), empty(simulated, 10)
        transfer.prepare(source)
        copy = transfer.submit(destination, source)
        assert (destination == -1).all(), "submit did not block"
        source.fill_(7)
        copy.wait()
        assert (destination == 7).all(), "too early: the source was still to be read"
        copy = transfer.submit(destination, source.copy_(torch.arange(10.0)))
        copy.release_source()
        source.fill_(9)
        copy.wait()
        assert destination.tolist() == list(range(10))


@MODES
@pytest.mark.parametrize("keep_copy", [True, False])
def test_a_source_dropped_right_after_submit_still_arrives(simulated, mapped, keep_copy):
    transfer = direct(simulated, chunk_elements=300, mapped=mapped)
    destinations, copies = [], []
    for value in range(4):
        source = torch.full((1000,), float(value))
        transfer.prepare(source)
        destinations.append(empty(simulated, 1000))
        copies.append(transfer.submit(destinations[-1], source))
        assert transfer.page_locked_bytes == 4000 * (value + 1), "still registered, as it is still read"
        del source
    if not keep_copy:
        copies.clear()
    gc.collect()
    others = [torch.full((1000,), 99.0) for _ in range(8)]  # would take the memory if it were free
    for copy in copies:
        copy.wait()
    transfer.close()
    del others
    assert [set(destination.tolist()) for destination in destinations] == [{0.0}, {1.0}, {2.0}, {3.0}]
    assert simulated.pinned_bytes == 0


def test_a_storage_is_registered_once_whoever_prepares_which_view(simulated):
    recorder = Recorder(simulated)
    first, second = direct(simulated), direct(simulated)
    base = torch.arange(1000.0)
    for transfer in (first, second):
        for view in (base[10:20], base, base[500:].view(50, 10), base[10:20]):
            transfer.prepare(view)
            transfer.copy(empty(simulated, *view.shape), view)
        assert transfer.page_locked_bytes == 4000
    assert recorder.registered == [(base.data_ptr(), 4000)]
    first.close()
    assert recorder.unregistered == []
    destination = empty(simulated, 1000, dtype=torch.float32)
    second.copy(destination, base)
    assert torch.equal(destination, torch.arange(1000.0))
    second.close()
    assert recorder.unregistered == [base.data_ptr()]
    assert simulated.pinned_bytes == 0


@pytest.mark.parametrize("last", ["unprepare", "close", "drop"])
def test_the_last_of_two_holders_gives_it_back(simulated, last):
    transfers = [direct(simulated), direct(simulated)]
    base = torch.zeros(1000)
    for transfer in transfers:
        transfer.prepare(base)
    transfers[0].unprepare(base)
    assert (transfers[0].page_locked_bytes, simulated.pinned_bytes) == (0, 4000)
    transfers[0].unprepare(base)  # not a second time what the other one holds
    assert simulated.pinned_bytes == 4000
    transfer = transfers.pop()
    if last == "drop":
        del transfer
        gc.collect()
    elif last == "close":
        transfer.close()
    else:
        transfer.unprepare(base[3:4])
    assert simulated.pinned_bytes == 0


def test_a_source_that_another_transfer_prepared_is_joined_and_held(simulated):
    first, second = direct(simulated), direct(simulated)
    base, destination = torch.arange(10.0), empty(simulated, 10)
    first.prepare(base)
    copy = second.submit(destination, base)
    first.close()
    assert simulated.pinned_bytes == 40, "the other one reads it"
    copy.wait()
    assert destination.tolist() == list(range(10))
    second.close()
    assert simulated.pinned_bytes == 0


@MODES
def test_unprepare_waits_for_the_copies_that_read(simulated, mapped):
    with direct(simulated, chunk_elements=3, mapped=mapped) as transfer:
        source, destination = torch.arange(10.0), empty(simulated, 10)
        transfer.prepare(source)
        transfer.submit(destination, source)
        transfer.unprepare(source)  # a missing wait is an InFlightError
        assert destination.tolist() == list(range(10))
        assert simulated.pinned_bytes == 0
        with pytest.raises(StrategyUnavailableError, match="prepare"):
            transfer.copy(destination, source)
        transfer.prepare(source)
        transfer.copy(destination, source)


def test_a_freed_storage_is_given_back(simulated):
    with direct(simulated) as transfer:
        source = torch.zeros(1000)
        transfer.prepare(source)
        view = source[5:]
        del source
        gc.collect()
        assert transfer.page_locked_bytes == simulated.pinned_bytes == 4000
        del view
        gc.collect()
        assert transfer.page_locked_bytes == simulated.pinned_bytes == 0
        transfer.unprepare(torch.zeros(1000))


@MODES
def test_a_rebound_parameter_is_a_new_source_each_time(simulated, mapped):
    """Values, path and counters follow the storage, never the object."""
    recorder = Recorder(simulated)
    transfer = PinnedDirectTransfer(accelerator=simulated, chunk_elements=30, mapped=mapped)
    transfer.share_stand_in(lambda name: build_transfer({"strategy": name}, simulated)._strategy(name))
    parameter = torch.nn.Parameter(torch.full((100,), 1.0))
    pinned = simulated.pin_empty(100, dtype=torch.float32).fill_(3.0)
    pieces = 1 if mapped else 4

    def counts():
        now = transfer.stats()["pinned_direct"]
        return now.copies, now.pieces, now.passed_on

    def arrives(value):
        destination = empty(simulated, 100)
        transfer.submit(destination, parameter).wait()
        assert set(destination.tolist()) == {value}

    transfer.prepare(parameter)
    arrives(1.0)
    assert counts() == (1, pieces, 0)
    parameter.data = torch.full((100,), 2.0)  # pageable, and nobody has prepared it
    assert transfer.page_locked_bytes == 0, "given back when it was replaced"
    arrives(2.0)
    assert counts() == (1, pieces, 1)
    parameter.data = pinned
    arrives(3.0)
    assert counts() == (2, pieces + 4, 1)  # memory that others have pinned always goes in chunks
    parameter.data = torch.full((100,), 4.0)
    transfer.prepare(parameter)
    arrives(4.0)
    assert counts() == (3, 2 * pieces + 4, 1)
    assert len(recorder.registered) == 2
    assert transfer.page_locked_bytes == 400
    assert parameter.requires_grad
    transfer.close()
    assert simulated.unpin_memory(pinned)
    assert recorder.unregistered == [address for address, _ in recorder.registered]


@pytest.mark.parametrize("numel", [2000, 500, 0])
def test_a_resized_storage_is_stale(simulated, numel):
    recorder = Recorder(simulated)
    transfer = PinnedDirectTransfer(accelerator=simulated, mapped=False, chunk_elements=300)
    source = torch.arange(1000.0)
    transfer.prepare(source)
    occupied = source.untyped_storage()
    occupied.resize_(0)
    others = [torch.zeros(1000) for _ in range(4)]  # takes the address
    occupied.resize_(4 * numel)
    if numel:
        view = source[:500].copy_(torch.arange(500.0))
        destination = empty(simulated, 500, dtype=torch.float32)
        transfer.copy(destination, view)
        assert torch.equal(destination, torch.arange(500.0))
        assert transfer.stats()["pinned_direct"].passed_on == 1
        transfer.prepare(view)
        transfer.copy(destination, view)
        assert transfer.stats()["pinned_direct"].passed_on == 1
        assert recorder.registered[1:] == [(occupied.data_ptr(), 4 * numel)]
    assert transfer.page_locked_bytes == simulated.pinned_bytes - transfer._stand_in.pinned_bytes
    transfer.close()
    assert simulated.pinned_bytes == 0
    del others


def test_a_stale_registration_costs_nobody_a_wait_for_ever(simulated):
    """Only the copy that finds it waits for what is in flight; later ones are queued behind each other again."""
    source = torch.zeros(1000)
    with direct(simulated, chunk_elements=3) as transfer:
        transfer.prepare(source)
        source.untyped_storage().resize_(8000)
        pinned = [simulated.pin_empty(10, dtype=torch.float32).fill_(value) for value in (1, 2, 3)]
        destinations = [empty(simulated, 10) for _ in pinned]
        transfer.copy(destinations[0], pinned[0])
        transfer.submit(destinations[1], pinned[1])
        transfer.submit(destinations[2], pinned[2])
        assert (destinations[1] == -1).all(), "the third submit waited for the second"
    assert [set(each.tolist()) for each in destinations] == [{1.0}, {2.0}, {3.0}]


def test_empty_sources_are_not_registered(simulated):
    recorder = Recorder(simulated)
    with direct(simulated) as transfer:
        transfer.prepare(torch.empty(0))
        transfer.prepare(torch.arange(10.0)[3:3])
        transfer.prepare(torch.empty(0, 8))
        transfer.copy(empty(simulated, 10)[5:5], torch.arange(10.0)[3:3])
        transfer.unprepare(torch.empty(0))
    assert not recorder.registered
    assert not recorder.copies


def test_exactly_the_limit_is_allowed(simulated):
    with direct(simulated, max_page_locked=4000) as transfer:
        sources = [torch.zeros(600), torch.zeros(400)]
        for source in sources:
            transfer.prepare(source)
        assert transfer.page_locked_bytes == 4000


def test_one_byte_over_the_limit_is_staged_after_one_warning(simulated):
    recorder = Recorder(simulated)
    transfer = PinnedDirectTransfer(accelerator=simulated, max_page_locked=3999, mapped=False)
    small, source = torch.zeros(600), torch.arange(400.0)
    transfer.prepare(small)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            transfer.prepare(source)
            destination = empty(simulated, 400, dtype=torch.float32)
            transfer.copy(destination, source)
            assert torch.equal(destination, torch.arange(400.0))
    assert [each.category for each in caught] == [FallbackWarning]
    message = str(caught[0].message)
    for part in ("1600 bytes", "2400", "3999", "pinned_direct.max_page_locked", "pinned_staged", "fallback: false"):
        assert part in message
    assert caught[0].filename == __file__
    assert recorder.registered == [(small.data_ptr(), 2400)]
    assert transfer.stats()["pinned_direct"].passed_on == 3
    transfer.unprepare(small)  # makes room
    transfer.prepare(source)
    assert transfer.page_locked_bytes == 1600
    transfer.close()


def test_over_the_limit_is_an_error_where_no_fallback_is_wanted(simulated):
    recorder = Recorder(simulated)
    with direct(simulated, max_page_locked=39) as transfer:
        source, destination = torch.arange(10.0), empty(simulated, 10)
        for _ in range(2):
            with pytest.raises(StrategyUnavailableError, match="40 bytes .* 39 bytes .*max_page_locked"):
                transfer.prepare(source)
            with pytest.raises(StrategyUnavailableError, match="not pinned"):
                transfer.copy(destination, source)
        assert transfer.pinned_bytes == 0
    assert not recorder.registered
    assert (destination == -1).all()


def test_the_limit_is_that_of_the_process(simulated):
    sources = [torch.zeros(600), torch.zeros(400)]
    with direct(simulated, max_page_locked=3999) as first, direct(simulated, max_page_locked=3999) as second:
        first.prepare(sources[0])
        second.prepare(sources[0])  # joins, and costs nothing
        with pytest.raises(StrategyUnavailableError, match="1600 bytes in place, beside 2400 that are"):
            second.prepare(sources[1])
        assert simulated.pinned_bytes == 2400


PAGE = 4096


@MODES
@pytest.mark.parametrize("answer", [None, False], ids=["raises", "says False"])
@pytest.mark.parametrize(("most_pages", "pieces"), [(20, 4), (6, 16), (2.2, 64)])
def test_what_is_refused_as_a_whole_is_registered_in_pieces(simulated, mapped, answer, most_pages, pieces):
    recorder = Recorder(simulated, most_bytes=int(most_pages * PAGE), answer=answer)
    # Not a whole number of pages, and as torch allocates it not at the beginning of one.
    source = torch.randint(-100, 100, (70 * 1024 + 5,)).float()
    begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
    transfer = direct(simulated, chunk_elements=3000, mapped=mapped)
    transfer.prepare(source)
    assert transfer.page_locked_bytes == simulated.pinned_bytes == source.nbytes
    locked = [each for each in sorted(recorder.registered) if each[0] not in recorder.unregistered]
    assert 1 < len(locked) <= pieces
    edges = [begin, *(address + size for address, size in locked)]
    assert edges == [*(address for address, _ in locked), end], "they meet, and cover it exactly"
    assert all(edge % PAGE == 0 for edge in edges[1:-1])
    for dtype in (BF16, torch.float32):
        for view in (source, source[1000:-1000], source[: 70 * 1024].view(280, 256)):
            destination = empty(simulated, *view.shape, dtype=dtype)
            recorder.copies.clear()
            transfer.copy(destination, view)
            assert torch.equal(destination, view.to(dtype))
            if not mapped or dtype is torch.float32:  # a mapped view is device memory
                read = [(address, address + 4 * numel) for host, numel, _, _, address in recorder.copies if host]
                assert sum(stop - start for start, stop in read) == view.nbytes
                assert not [edge for edge in edges for start, stop in read if start < edge < stop]
                assert max(numel for host, numel, *_ in recorder.copies if host) <= 3000
    transfer.close()
    assert simulated.pinned_bytes == 0
    assert sorted(recorder.unregistered[-len(locked) :]) == [address for address, _ in locked]


@pytest.mark.parametrize("answer", [None, False], ids=["raises", "says False"])
def test_what_is_refused_altogether_is_asked_for_twice(simulated, answer):
    recorder = Recorder(simulated, most_bytes=0, answer=answer)
    transfer = PinnedDirectTransfer(accelerator=simulated, mapped=False)
    source = torch.arange(10_000.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transfer.prepare(source)
        attempts = recorder.refused
        assert attempts == 2  # 40,000 bytes: whole, and in four; for 16 pieces of a page it is too small
        second = torch.arange(10_000.0)
        for other in (source, second, source[4:], torch.arange(10_000.0), second):
            transfer.prepare(other)
            destination = empty(simulated, other.numel(), dtype=torch.float32)
            transfer.copy(destination, other)
            assert torch.equal(destination, other)
    assert recorder.refused == 2 * attempts  # of two storages; then no other is tried
    assert [each.category for each in caught] == [FallbackWarning]
    for part in ("40000 bytes", "pinned_direct.page_lock: false", "pinned_staged", "fallback: false"):
        assert part in str(caught[0].message)
    assert ("out of locked memory" if answer is None else "cannot page-lock") in str(caught[0].message)
    assert transfer.page_locked_bytes == 0
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_a_refusal_is_an_error_each_time_where_no_fallback_is_wanted(simulated):
    recorder = Recorder(simulated, most_bytes=0)
    with direct(simulated) as transfer:
        source, destination = torch.arange(10.0), empty(simulated, 10)
        for _ in range(2):
            with pytest.raises(StrategyUnavailableError, match="40 bytes in place failed: out of locked memory"):
                transfer.prepare(source)
            with pytest.raises(StrategyUnavailableError, match="out of locked memory"):
                transfer.copy(destination, source)
        assert recorder.refused == 1
    assert simulated.pinned_bytes == 0
    assert (destination == -1).all()


def test_no_page_lock_means_no_registration(simulated):
    recorder = Recorder(simulated)
    with PinnedDirectTransfer(accelerator=simulated, page_lock=False, mapped=False, chunk_elements=4) as transfer:
        transfer.prepare(torch.zeros(10))
        pinned, destination = simulated.pin_empty(10, dtype=torch.float32), empty(simulated, 10)
        transfer.copy(destination, pinned.copy_(torch.arange(10.0)))
        assert destination.tolist() == list(range(10))
        assert transfer.stats()["pinned_direct"].pieces == 3
    assert not recorder.registered


@pytest.mark.parametrize("way", ["unprepare", "close"])
@pytest.mark.parametrize("failed_after", [0, 1, 2])
def test_a_failed_unregister_is_tried_again(simulated, way, failed_after):
    """Of a storage in four pieces, so that a part is given back when it fails."""
    Recorder(simulated, most_bytes=PAGE * 5)
    transfer = PinnedDirectTransfer(accelerator=simulated, chunk_elements=3000)
    source, destination = torch.arange(16 * 1024).float() % 128, empty(simulated, 16 * 1024)
    transfer.prepare(source)
    with (
        failing(simulated, "unregister_host_memory", OSError("busy"), after=failed_after),
        pytest.raises(OSError, match="busy"),
    ):
        transfer.unprepare(source) if way == "unprepare" else transfer.close()
    assert simulated.pinned_bytes > 0
    transfer.copy(destination, source)  # never from what is registered in part
    assert torch.equal(destination, source.bfloat16())
    transfer.close()
    assert simulated.pinned_bytes == transfer.pinned_bytes == transfer.page_locked_bytes == 0


@MODES
def test_what_is_registered_in_part_is_nobodys_source(simulated, mapped):
    """After a failed unprepare, another transfer neither joins the rest nor trips over it."""
    Recorder(simulated, most_bytes=PAGE * 5)
    first, second = direct(simulated), direct(simulated, mapped=mapped, chunk_elements=3000)
    source, destination = torch.arange(16 * 1024).float() % 128, empty(simulated, 16 * 1024)
    first.prepare(source)
    with failing(simulated, "unregister_host_memory", OSError("busy"), after=1), pytest.raises(OSError, match="busy"):
        first.unprepare(source)
    assert 0 < first.page_locked_bytes == simulated.pinned_bytes < source.nbytes
    with pytest.raises(StrategyUnavailableError, match="not pinned"):
        second.copy(destination, source)
    second.prepare(source)
    second.copy(destination, source)
    assert torch.equal(destination, source.bfloat16())
    first.close()
    assert second.page_locked_bytes == simulated.pinned_bytes == source.nbytes
    second.close()
    assert simulated.pinned_bytes == 0


def test_a_storage_that_moved_with_its_size_is_stale(simulated):
    """share_memory_ keeps the storage and its size, and gives it another address."""
    recorder = Recorder(simulated)
    with PinnedDirectTransfer(accelerator=simulated, mapped=False, chunk_elements=300) as transfer:
        source, destination = torch.arange(1000.0), empty(simulated, 1000, dtype=torch.float32)
        transfer.prepare(source)
        before = source.data_ptr()
        source.share_memory_()
        assert source.data_ptr() != before
        transfer.copy(destination, source)
        assert torch.equal(destination, torch.arange(1000.0))
        assert transfer.stats()["pinned_direct"].passed_on == 1
        assert recorder.unregistered == [before]
    assert simulated.pinned_bytes == 0


def test_a_failed_unregister_at_the_end_of_a_storage_is_made_up_for(simulated):
    transfer = PinnedDirectTransfer(accelerator=simulated, chunk_elements=300)
    source = torch.zeros(1000)
    transfer.prepare(source)
    with failing(simulated, "unregister_host_memory", RuntimeError("busy")):
        del source
        gc.collect()
    assert simulated.pinned_bytes == transfer.page_locked_bytes == 4000
    source, destination = torch.arange(100.0), empty(simulated, 100)
    transfer.copy(destination, source)
    assert destination.tolist() == list(range(100))
    transfer.close()
    assert simulated.pinned_bytes == 0


@pytest.mark.parametrize("copies", [True, False])
def test_what_a_failed_registration_could_not_give_back_is_given_back_later(simulated, copies):
    """Of the four pieces the second is refused, and then the first cannot be given back."""
    register = simulated.register_host_memory
    sizes = []

    def first_piece_only(address, num_bytes):
        sizes.append(num_bytes)
        if num_bytes == max(sizes) or simulated.pinned_bytes:
            raise RuntimeError("out of locked memory")
        return register(address, num_bytes)

    simulated.register_host_memory = first_piece_only
    transfer = PinnedDirectTransfer(accelerator=simulated, chunk_elements=3000)
    source, destination = torch.arange(12 * 1024).float() % 128, empty(simulated, 12 * 1024)
    with failing(simulated, "unregister_host_memory", RuntimeError("busy"), times=100), pytest.warns(FallbackWarning):
        transfer.prepare(source)
    assert simulated.pinned_bytes > 0
    assert transfer.page_locked_bytes == 0, "not as a whole"
    if copies:
        transfer.copy(destination, source)
        assert torch.equal(destination, source.bfloat16())
    transfer.close()
    assert simulated.pinned_bytes == 0


class Paged(SimulatedAccelerator):
    """Registers whole pages only, as some drivers do."""

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, register_alignment_bytes=PAGE)

    def register_host_memory(self, address, num_bytes):
        assert address % PAGE == 0
        return super().register_host_memory(address, num_bytes)


@MODES
@pytest.mark.parametrize("most_bytes", [None, 5 * PAGE])
def test_addresses_are_aligned_where_the_accelerator_wants_it(mapped, most_bytes):
    paged = Paged()
    recorder = Recorder(paged, most_bytes=most_bytes)
    source = torch.arange(16 * 1024).float()[6:]
    storage = source.untyped_storage()
    with direct(paged, chunk_elements=3000, mapped=mapped) as transfer:
        transfer.prepare(source)
        covered = sorted(each for each in recorder.registered if each[0] not in recorder.unregistered)
        assert covered[0][0] <= storage.data_ptr() < covered[0][0] + PAGE
        assert covered[-1][0] + covered[-1][1] >= storage.data_ptr() + storage.nbytes()
        assert all(first[0] + first[1] == second[0] for first, second in itertools.pairwise(covered))
        assert transfer.page_locked_bytes == 65_536
        destination = empty(paged, source.numel(), dtype=torch.float64 if mapped else torch.float32)
        transfer.copy(destination, source)
        assert torch.equal(destination, source.to(destination.dtype))
    assert paged.pinned_bytes == 0


@pytest.mark.filterwarnings("ignore::transfer.FallbackWarning")
@pytest.mark.parametrize("options", [{"events": False}, {"streams": False}, {"streams": False, "events": False}])
def test_without_streams_or_events(options):
    bare = SimulatedAccelerator(**options)
    recorder = Recorder(bare)
    for transfer in (PinnedDirectTransfer(accelerator=bare), build_transfer({"strategy": "pinned_direct"}, bare)):
        source, destination = torch.arange(10.0), empty(bare, 10)
        transfer.prepare(source)
        recorder.copies.clear()
        bare_copy = bare.enqueue_copy
        bare.enqueue_copy = lambda destination, source: SimulatedAccelerator.enqueue_copy(bare, destination, source)
        transfer.copy(destination, source)
        bare.enqueue_copy = bare_copy
        assert destination.tolist() == list(range(10))
        transfer.close()
    assert not recorder.registered
    strict = direct(bare)
    with pytest.raises(StrategyUnavailableError, match="was made without"):
        strict.prepare(torch.zeros(10))
    pinned = bare.pin_empty(10, dtype=torch.float32)
    with pytest.raises(StrategyUnavailableError, match="was made without"):
        strict.copy(empty(bare, 10), pinned)


def test_an_accelerator_that_registers_nothing():
    class Cannot(SimulatedAccelerator):
        @property
        def capabilities(self):
            return dataclasses.replace(
                super().capabilities, registers_host_memory=False, reasons={"registers_host_memory": "It cannot."}
            )

    simulated = Cannot()
    recorder = Recorder(simulated)
    transfer = PinnedDirectTransfer(accelerator=simulated, mapped=False)
    with pytest.warns(FallbackWarning, match="cannot page-lock 40 bytes in place. It cannot"):
        transfer.prepare(torch.zeros(10))
    transfer.prepare(torch.zeros(10))
    source, destination = torch.arange(10.0), empty(simulated, 10, dtype=torch.float32)
    transfer.copy(destination, source)
    assert destination.tolist() == list(range(10))
    # What is pinned already goes directly all the same.
    transfer.copy(destination, simulated.pin_empty(10, dtype=torch.float32).fill_(3))
    assert set(destination.tolist()) == {3.0}
    counts = transfer.stats()["pinned_direct"]
    assert (counts.copies, counts.passed_on) == (1, 1)
    assert not recorder.registered
    with pytest.raises(StrategyUnavailableError, match="It cannot"):
        direct(simulated).prepare(source)


@MODES
def test_threads_share_one_transfer(simulated, mapped):
    wrong = []
    transfer = direct(simulated, chunk_elements=256, mapped=mapped)

    def work(value):
        try:
            for numel in (1, 1000, 10_007) * 4:
                source, destination = torch.full((numel,), value), empty(simulated, numel)
                transfer.prepare(source)
                transfer.submit(destination, source).wait()
                if not (destination == value).all():
                    wrong.append(value)
                if numel == 1000:
                    transfer.unprepare(source)
        except Exception as error:  # noqa: BLE001 - a thread's error must reach the test
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(float(i + 1),), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert transfer.scratch_bytes == (0 if mapped else 2 * 256 * 4)
    transfer.close()
    gc.collect()
    assert simulated.pinned_bytes == 0


@pytest.mark.parametrize("after", [0, 1])
def test_refused_scratch_is_staged_after_one_warning_and_nothing_of_it_is_kept(simulated, after):
    transfer = PinnedDirectTransfer(accelerator=simulated, chunk_elements=3, mapped=False)
    source, destinations = torch.arange(10.0), [empty(simulated, 10) for _ in range(3)]
    transfer.prepare(source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for destination in destinations[:2]:
            with failing(simulated, "device_empty", RuntimeError("device is full"), after=after, times=100):
                transfer.copy(destination, source)
            assert transfer.scratch_bytes == 0
    assert [each.category for each in caught] == [FallbackWarning]
    for part in ("24 bytes of device scratch", "device is full", "pinned_direct.chunk_elements", "pinned_staged"):
        assert part in str(caught[0].message)
    assert transfer.stats()["pinned_direct"].passed_on == 2
    transfer.copy(destinations[2], source)  # there is memory again
    assert transfer.scratch_bytes == 24
    assert all(destination.tolist() == list(range(10)) for destination in destinations)
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_refused_scratch_is_an_error_where_no_fallback_is_wanted(simulated):
    transfer = direct(simulated, chunk_elements=3)
    source, destination = torch.arange(10.0), empty(simulated, 10)
    transfer.prepare(source)
    with (
        failing(simulated, "device_empty", RuntimeError("device is full")),
        pytest.raises(StrategyUnavailableError, match=r"24 bytes of device scratch .*full.*chunk_elements"),
    ):
        transfer.copy(destination, source)
    assert (destination == -1).all()
    transfer.copy(destination, source)
    assert destination.tolist() == list(range(10))
    transfer.close()


def test_a_source_that_is_not_contiguous_is_staged(simulated):
    parent = torch.arange(20.0)
    for view in (parent[::2], parent.view(4, 5).t()):
        transfer = PinnedDirectTransfer(accelerator=simulated)
        transfer.prepare(view)
        destination = empty(simulated, *view.shape)
        transfer.copy(destination, view)
        assert torch.equal(destination, view.bfloat16())
        assert transfer.stats()["pinned_direct"].passed_on == 1
        with direct(simulated) as strict, pytest.raises(StrategyUnavailableError, match="not contiguous"):
            strict.copy(destination, view)
        transfer.close()


@MODES
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_strided_destination_is_direct(simulated, mapped, dtype):
    recorder = Recorder(simulated)
    source = torch.arange(12.0)
    with direct(simulated, chunk_elements=5, mapped=mapped) as transfer:
        transfer.prepare(source)
        parent = empty(simulated, 24, dtype=dtype)
        transfer.copy(parent[::2], source)
        assert parent.tolist() == [each for index in range(12) for each in (index, -1)]
        storage = empty(simulated, 3, 4, dtype=dtype)
        transfer.copy(storage.t(), source.view(4, 3))
        assert storage.flatten().tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
        narrow = empty(simulated, 4, 4, dtype=dtype)
        transfer.copy(narrow[:, :3], source.view(4, 3))
        assert narrow.tolist() == [[3 * row, 3 * row + 1, 3 * row + 2, -1] for row in range(4)]
        assert transfer.stats()["pinned_direct"].copies == 3
    assert all(to == of for _, to, of in recorder.from_host)


def test_a_strided_destination_of_a_source_in_pieces_goes_through_scratch(simulated):
    """Where the first registration ends after one row, its chunk alone is contiguous in the destination."""
    Recorder(simulated, most_bytes=PAGE * 5)
    source = torch.arange(16 * 1024).float()
    with direct(simulated, chunk_elements=8 * 1024) as transfer:
        transfer.prepare(source)
        column = 1024
        addresses = [address for address, _ in simulated._registered._sizes.items()]
        edge = min(each for each in addresses if each > source.data_ptr()) - source.data_ptr()
        view = source[edge // 4 - column :][: 8 * column].view(8, column)
        parent = empty(simulated, 8, column + 1, dtype=torch.float32)
        transfer.copy(parent[:, :column], view)
        assert torch.equal(parent[:, :column], view)
        assert (parent[:, column] == -1).all()
        assert transfer.scratch_bytes == 2 * 8 * 1024 * 4


def test_an_unprepare_inside_a_submit_is_done_after_it(simulated):
    """By a signal handler or a finalizer; the rest of the copy still reads the source."""
    pinned = []
    original = simulated.enqueue_copy
    transfer = direct(simulated, chunk_elements=3)
    source, destination = torch.arange(10.0), empty(simulated, 10)

    def interrupted(to, of):
        transfer.unprepare(source)
        if simulated.on_host(of):
            pinned.append(simulated.is_pinned(of))
        original(to, of)

    transfer.prepare(source)
    simulated.enqueue_copy = interrupted
    transfer.copy(destination, source)
    simulated.enqueue_copy = original
    assert pinned == [True] * 4
    assert destination.tolist() == list(range(10))
    assert simulated.pinned_bytes == 0
    transfer.close()


def test_a_close_gives_back_while_copies_are_in_flight(simulated):
    transfer = direct(simulated, chunk_elements=3)
    source, destination = torch.arange(10.0), empty(simulated, 10)
    transfer.prepare(source)
    transfer.submit(destination, source)
    transfer.close()
    assert destination.tolist() == list(range(10))
    assert simulated.pinned_bytes == transfer.scratch_bytes == 0
    transfer.close()
    with pytest.raises(StrategyUnavailableError):
        transfer.copy(destination, source)
    with contextlib.closing(transfer):
        transfer.prepare(source)
        transfer.copy(destination, source)
    assert simulated.pinned_bytes == 0
