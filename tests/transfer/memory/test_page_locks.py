"""What ``pinned_direct`` page-locks, for how long, and what it does where that is refused."""

import dataclasses
import gc
import warnings

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from tests.transfer.direct_tools import MODES, PAGE, Recorder, direct, empty, routed
from transfer import FallbackWarning, PinnedDirectTransfer, StrategyUnavailableError, build_transfer


def test_a_storage_is_registered_once_for_all_transfers_and_views(simulated):
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
    transfer = routed(simulated, chunk_elements=30, mapped=mapped)
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
    parameter.data = torch.full((100,), 2.0)  # pageable, and not prepared
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
    transfer = routed(simulated, mapped=False, chunk_elements=300)
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
    assert transfer.page_locked_bytes == simulated.pinned_bytes - transfer.policy.strategy("pinned_staged").pinned_bytes
    transfer.close()
    assert simulated.pinned_bytes == 0
    del others


def test_a_stale_registration_makes_one_copy_wait(simulated):
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
    transfer = routed(simulated, max_page_locked=3999, mapped=False)
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
    for part in ("1600 bytes", "2400", "3999", "pinned_direct.max_page_locked", "fallback: false"):
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
            with pytest.raises(StrategyUnavailableError, match="not page-locked"):
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


@pytest.mark.parametrize("answer", [None, False], ids=["raises", "says False"])
def test_what_is_refused_is_staged_after_one_warning_and_says_nothing_about_another(simulated, answer):
    recorder = Recorder(simulated, most_bytes=39_999, answer=answer)
    transfer = routed(simulated, mapped=False)
    large, small = torch.arange(10_000.0), torch.arange(1000.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for source in (large, torch.arange(10_000.0), small):
            transfer.prepare(source)
            destination = empty(simulated, source.numel(), dtype=torch.float32)
            transfer.copy(destination, source)
            assert torch.equal(destination, source)
    assert recorder.refused == 2
    assert [each.category for each in caught] == [FallbackWarning]
    for part in ("40000 bytes", "pinned_direct.page_lock: false", "fallback: false"):
        assert part in str(caught[0].message)
    assert ("out of locked memory" if answer is None else "cannot page-lock") in str(caught[0].message)
    assert transfer.page_locked_bytes == 4000
    counts = transfer.stats()["pinned_direct"]
    assert (counts.copies, counts.passed_on) == (1, 2)
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_a_refusal_is_an_error_each_time_where_no_fallback_is_wanted(simulated):
    recorder = Recorder(simulated, most_bytes=0)
    for transfer in (direct(simulated), routed(simulated, fallback=False)):
        source, destination = torch.arange(10.0), empty(simulated, 10)
        for _ in range(2):
            with pytest.raises(StrategyUnavailableError, match="40 bytes in place failed: out of locked memory"):
                transfer.prepare(source)
            with pytest.raises(StrategyUnavailableError, match="not page-locked"):
                transfer.copy(destination, source)
        transfer.close()
        assert (destination == -1).all()
    assert recorder.refused == 4
    assert simulated.pinned_bytes == 0


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
def test_a_failed_unregister_is_tried_again(simulated, way):
    transfer = routed(simulated, chunk_elements=300)
    source, destination = torch.arange(1000.0) % 128, empty(simulated, 1000)
    transfer.prepare(source)
    with failing(simulated, "unregister_host_memory", OSError("busy"), times=2), pytest.raises(OSError, match="busy"):
        transfer.unprepare(source) if way == "unprepare" else transfer.close()
    assert simulated.pinned_bytes == 4000
    transfer.copy(destination, source)
    assert torch.equal(destination, source.bfloat16())
    transfer.close()
    assert simulated.pinned_bytes == transfer.pinned_bytes == transfer.page_locked_bytes == 0


@MODES
def test_what_could_not_be_given_back_is_not_a_source(simulated, mapped):
    """After a failed unprepare, another transfer neither joins the registration nor trips over it."""
    first, second = direct(simulated), direct(simulated, mapped=mapped, chunk_elements=3000)
    source, destination = torch.arange(16 * 1024).float() % 128, empty(simulated, 16 * 1024)
    first.prepare(source)
    with failing(simulated, "unregister_host_memory", OSError("busy"), times=2), pytest.raises(OSError, match="busy"):
        first.unprepare(source)
    assert first.page_locked_bytes == simulated.pinned_bytes == source.nbytes
    with pytest.raises(StrategyUnavailableError, match="not page-locked"):
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
    with routed(simulated, mapped=False, chunk_elements=300) as transfer:
        source, destination = torch.arange(1000.0), empty(simulated, 1000, dtype=torch.float32)
        transfer.prepare(source)
        before = source.data_ptr()
        source.share_memory_()
        assert source.data_ptr() != before
        transfer.copy(destination, source)
        assert torch.equal(destination, torch.arange(1000.0))
        assert transfer.stats()["pinned_direct"].passed_on == 1
        transfer.prepare(source)
        assert recorder.unregistered == [before]
        assert simulated.pinned_bytes - transfer.policy.strategy("pinned_staged").pinned_bytes == 4000
    assert simulated.pinned_bytes == 0


def test_a_failed_unregister_at_the_end_of_a_storage_is_made_up_for(simulated):
    transfer = routed(simulated, chunk_elements=300)
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


class Paged(SimulatedAccelerator):
    """Registers whole pages only, as some drivers do."""

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, register_alignment_bytes=PAGE)

    def register_host_memory(self, address, num_bytes):
        assert address % PAGE == 0
        return super().register_host_memory(address, num_bytes)


@MODES
def test_addresses_are_aligned_where_the_accelerator_wants_it(mapped):
    paged = Paged()
    recorder = Recorder(paged)
    source = torch.arange(16 * 1024).float()[6:]
    storage = source.untyped_storage()
    with direct(paged, chunk_elements=3000, mapped=mapped) as transfer:
        transfer.prepare(source)
        ((begin, length),) = recorder.registered
        assert begin <= storage.data_ptr() < begin + PAGE
        assert begin + length >= storage.data_ptr() + storage.nbytes()
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
    for transfer in (build_transfer({}, bare), routed(bare)):
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
    transfer = routed(simulated, mapped=False)
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
