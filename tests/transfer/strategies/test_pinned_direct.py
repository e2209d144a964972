"""How ``pinned_direct`` copies: what it queues and holds, seen from the accelerator."""

import contextlib
import dataclasses
import gc
import warnings

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from tests.running import run_threads
from tests.transfer.direct_tools import BF16, MODES, Recorder, direct, empty, routed
from transfer import FallbackWarning, PinnedDirectConfig, StrategyUnavailableError
from transfer.memory.scratch_ring import ScratchRing


def test_each_chunk_crosses_uncast_and_pinned_into_scratch_of_the_configured_size(simulated, monkeypatch):
    recorder = Recorder(simulated)
    transfer = direct(simulated, chunk_elements=1000, buffers=3)
    source, destination = torch.arange(10_500.0), empty(simulated, 10_500)
    transfer.prepare(source)
    allocated, scratch = [], []
    for name in ("empty", "empty_like", "zeros"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, make=make, **kw: allocated.append(size) or make(*size, **kw))
    device_empty = simulated.device_empty
    monkeypatch.setattr(
        simulated, "device_empty", lambda *size, **kw: scratch.append(size) or device_empty(*size, **kw)
    )
    transfer.copy(destination, source)
    assert sorted(numel for numel, *_ in recorder.from_host) == [500] + [1000] * 10
    assert {(to, of) for _, to, of in recorder.from_host} == {(torch.float32, torch.float32)}
    # (1,): validation asks torch once for each pair of dtypes.
    assert [size for size in allocated if size != (1,)] == [], "nothing of the partition's size"
    assert scratch == [(1000,)] * 3
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


@pytest.mark.parametrize("chunk", [1, 3, 5, 9])  # two chunks and more, so that both copies use both slots
def test_the_simulated_accelerator_notices_scratch_that_is_guarded_per_submit(monkeypatch, chunk):
    """That the test before can fail: slots whose buffers outlive the stream that orders them."""
    begin = ScratchRing.begin

    def careless(ring):
        for slot in ring._slots:
            slot.stream = ring._accelerator.Stream()
        return begin(ring)

    monkeypatch.setattr(ScratchRing, "begin", careless)
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

    run_threads(work, [float(i + 1) for i in range(4)])
    assert not wrong
    assert transfer.scratch_bytes == (0 if mapped else 2 * 256 * 4)
    transfer.close()
    gc.collect()
    assert simulated.pinned_bytes == 0


@pytest.mark.parametrize("after", [0, 1])
def test_refused_scratch_is_staged_after_one_warning_and_nothing_of_it_is_kept(simulated, after):
    transfer = routed(simulated, chunk_elements=3, mapped=False)
    source, destinations = torch.arange(10.0), [empty(simulated, 10) for _ in range(3)]
    transfer.prepare(source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for destination in destinations[:2]:
            with failing(simulated, "device_empty", RuntimeError("device is full"), after=after, times=100):
                transfer.copy(destination, source)
            assert transfer.scratch_bytes == 0
    assert [each.category for each in caught] == [FallbackWarning]
    for part in ("24 bytes of device scratch", "device is full", "pinned_direct.chunk_elements", "fallback: false"):
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
        transfer = routed(simulated)
        transfer.prepare(view)
        destination = empty(simulated, *view.shape)
        with pytest.warns(FallbackWarning, match="not contiguous"):
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


@MODES
@pytest.mark.parametrize("strides", [(4,), (7, 3)])
def test_one_element_of_any_strides(simulated, mapped, strides):
    source = torch.arange(4.0).as_strided((1,) * len(strides), strides, 2)
    destination = empty(simulated, *source.shape)
    with direct(simulated, mapped=mapped) as transfer:
        transfer.prepare(source)
        transfer.submit(destination, source).wait()
        assert destination.tolist() == source.tolist()
        assert transfer.stats()["pinned_direct"].copies == 1


@pytest.mark.parametrize("registers", [True, False])
def test_a_forced_strategy_that_never_can_warns_once_and_advises_nothing_in_vain(registers):
    accelerator = SimulatedAccelerator()
    options = {"page_lock": False}
    if not registers:
        options = {}
        accelerator = Unregistering()
    source, destination = torch.arange(600_000.0), empty(accelerator, 600_000)
    with routed(accelerator, **options) as transfer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transfer.prepare(source)
        for _ in range(3):
            transfer.copy(destination, source)
    assert torch.equal(destination, source.bfloat16())
    assert [warning.category for warning in caught] == [FallbackWarning]
    assert "`prepare" not in str(caught[0].message)
    reason = direct(accelerator, **options).why_not(destination, source)
    assert reason == (
        "The source is not page-locked, and `pinned_direct.page_lock` is false." if registers else Unregistering.REASON
    )
    with routed(accelerator, fallback=False, **options) as strict, pytest.raises(StrategyUnavailableError):
        strict.copy(destination, source)


class Unregistering(SimulatedAccelerator):
    """Pins what it allocates itself, and nothing in place."""

    REASON = "This accelerator pins nothing in place."

    @property
    def capabilities(self):
        has = super().capabilities
        return dataclasses.replace(
            has, registers_host_memory=False, reasons={**has.reasons, "registers_host_memory": self.REASON}
        )

    def register_host_memory(self, address, num_bytes):
        return False


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
