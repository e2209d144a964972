"""What ``stats`` counts, and the ranges that profilers show."""

import time

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from transfer import (
    HostToDeviceTransfer,
    InFlightCopy,
    PageableTransfer,
    PinnedDirectTransfer,
    PinnedStagedTransfer,
    StrategyStats,
    StrategyUnavailableError,
    build_transfer,
    register_strategy,
    unregister_strategy,
)
from transfer.profiling import named_range

BF16 = torch.bfloat16


def counts(stats):
    """Without the seconds: copies, bytes, pieces, passed on; of those that did anything."""
    every = {name: (each.copies, each.bytes, each.pieces, each.passed_on) for name, each in stats.items()}
    return {name: numbers for name, numbers in every.items() if any(numbers)}


def empty(accelerator, numel=10, dtype=BF16):
    return accelerator.device_empty(numel, dtype=dtype).fill_(-1)


def test_pageable(simulated):
    transfer = PageableTransfer(accelerator=simulated)
    assert transfer.stats() == {"pageable": StrategyStats()}
    transfer.copy(empty(simulated), torch.zeros(10))
    transfer.copy(empty(simulated, 7, torch.float32), torch.zeros(7))
    assert counts(transfer.stats()) == {"pageable": (2, 10 * 2 + 7 * 4, 2, 0)}
    now = transfer.stats()["pageable"]
    assert now.wait_seconds > 0
    assert now.cast_seconds == 0


def test_pinned_staged(simulated):
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=3) as transfer:
        transfer.copy(empty(simulated), torch.zeros(10))  # 3 + 3 + 3 + 1
        transfer.copy(empty(simulated, 6, torch.float32), torch.zeros(6))
        assert counts(transfer.stats()) == {"pinned_staged": (2, 20 + 24, 4 + 2, 0)}
        now = transfer.stats()["pinned_staged"]
        assert now.cast_seconds > 0
        assert now.wait_seconds > 0


@pytest.mark.parametrize(("mapped", "pieces"), [(False, 4), (True, 1)])
def test_pinned_direct(simulated, mapped, pieces):
    with PinnedDirectTransfer(accelerator=simulated, chunk_elements=3, mapped=mapped) as transfer:
        source = torch.zeros(10)
        transfer.prepare(source)
        transfer.prepare(source)
        assert counts(transfer.stats()) == {}
        copy = transfer.submit(empty(simulated), source)
        assert counts(transfer.stats()) == {"pinned_direct": (1, 20, pieces, 0)}
        assert transfer.stats()["pinned_direct"].wait_seconds == 0, "submit does not block"
        copy.wait()
        waited = transfer.stats()["pinned_direct"].wait_seconds
        assert waited > 0
        copy.wait()
        copy.release_source()
        assert transfer.stats()["pinned_direct"].wait_seconds == waited, "there was nothing left to wait for"
        assert transfer.stats()["pinned_direct"].cast_seconds == 0
        # Without a cast, in chunks of 3 + 3 + 3 + 1 elements whether mapped or not.
        transfer.copy(empty(simulated, 10, torch.float32), source)
        assert counts(transfer.stats()) == {"pinned_direct": (2, 20 + 40, pieces + 4, 0)}


@pytest.mark.parametrize("release", ["release_source", "order_after"])
def test_whatever_blocks_for_the_device_counts_as_a_wait(simulated, release):
    with PinnedDirectTransfer(accelerator=simulated, chunk_elements=3, mapped=False) as transfer:
        source = simulated.pin_empty(10, dtype=torch.float32).fill_(1)
        copy = transfer.submit(empty(simulated), source)
        if release == "order_after":
            copy.order_after(simulated.current_stream())
            assert transfer.stats()["pinned_direct"].wait_seconds == 0, "the host does not wait"
            copy.order_after(None)
        else:
            copy.release_source()
        assert transfer.stats()["pinned_direct"].wait_seconds > 0


def test_a_wait_for_a_buffer_is_a_wait_and_not_a_cast(simulated):
    make = simulated.Event

    def slow_event():
        event = make()
        synchronize = event.synchronize
        event.synchronize = lambda: (time.sleep(0.02), synchronize())
        return event

    simulated.Event = slow_event
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=3) as transfer:
        copy = transfer.submit(empty(simulated), torch.zeros(10))  # waits for two of the four
        now = transfer.stats()["pinned_staged"]
        assert 0.04 <= now.wait_seconds < 0.06 + 0.5
        assert now.cast_seconds < 0.02
        copy.wait()
        assert transfer.stats()["pinned_staged"].wait_seconds - now.wait_seconds >= 0.02


def test_what_is_done_before_a_failure_is_not_a_copy(simulated):
    for transfer in (PageableTransfer(accelerator=simulated), PinnedStagedTransfer(accelerator=simulated)):
        with failing(simulated, "enqueue_copy", OSError("lost")), pytest.raises(OSError, match="lost"):
            transfer.copy(empty(simulated), torch.zeros(10))
        with pytest.raises(ValueError):
            transfer.copy(empty(simulated), torch.zeros(11))
        transfer.copy(empty(simulated, 0), torch.zeros(0))
        now = transfer.stats()[transfer.name]
        assert (now.copies, now.bytes, now.passed_on) == (0, 0, 0)
        transfer.copy(empty(simulated), torch.zeros(10))
        now = transfer.stats()[transfer.name]
        assert (now.copies, now.bytes, now.passed_on) == (1, 20, 0)
        transfer.close()


def test_what_another_strategy_copies_is_passed_on(simulated):
    config = {"strategy": "pinned_direct", "pinned_direct": {"chunk_elements": 3, "mapped": False}}
    with build_transfer(config, simulated) as transfer:
        source, unprepared = torch.zeros(10), torch.zeros(10)
        transfer.prepare(source)
        transfer.copy(empty(simulated), source)
        transfer.copy(empty(simulated), unprepared)
        large = empty(simulated, 2**19)
        transfer.copy(large, torch.zeros(2**19))
        transfer.copy(torch.zeros(10), source)  # within the host: pageable's own
        assert counts(transfer.stats()) == {
            "pinned_direct": (1, 20, 4, 2),
            "pinned_staged": (1, 2**20, 1, 0),
            "pageable": (2, 20 + 40, 2, 0),
        }
        direct, staged = transfer.stats()["pinned_direct"], transfer.stats()["pinned_staged"]
        assert direct.cast_seconds == 0
        assert staged.cast_seconds > 0


def test_a_strategy_alone_counts_plain_copies_as_its_own(simulated):
    with PinnedDirectTransfer(accelerator=simulated) as transfer:
        transfer.copy(torch.zeros(10), torch.ones(10))
        transfer.copy(empty(simulated), simulated.device_empty(10, dtype=BF16))
        assert counts(transfer.stats()) == {"pinned_direct": (2, 40 + 20, 2, 0)}


def test_a_refused_copy_is_not_counted(simulated):
    transfer = PinnedDirectTransfer(accelerator=simulated)
    with pytest.raises(StrategyUnavailableError):
        transfer.copy(empty(simulated), torch.zeros(10))
    transfer.close()
    assert counts(transfer.stats()) == {}


def test_counts_outlive_close(simulated):
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=4)
    for expected in (1, 2):
        transfer.copy(empty(simulated), torch.zeros(10))
        transfer.close()
        assert counts(transfer.stats()) == {"pinned_staged": (expected, 20 * expected, 3 * expected, 0)}


def test_build_transfer_counts_each_copy_once(simulated):
    numel = 2**19  # 1 MiB in bf16: what the default policy does not leave to pageable
    with build_transfer({}, simulated) as transfer:
        assert transfer.stats() == {}
        prepared, unprepared = torch.zeros(numel), torch.zeros(numel)
        transfer.prepare(prepared)
        transfer.copy(empty(simulated), torch.zeros(10))
        transfer.copy(empty(simulated, numel), prepared)
        transfer.copy(empty(simulated, numel), prepared)
        transfer.copy(empty(simulated, numel), unprepared)  # a row of the policy passed over is no fallback
        transfer.copy(empty(simulated, numel), unprepared)
        transfer.copy(empty(simulated, 2 * numel), torch.zeros(4 * numel)[::2])  # not contiguous: staged at once
        every = counts(transfer.stats())
    mib = 2**20
    assert every == {
        "pageable": (1, 20, 1, 0),
        "pinned_direct": (2, 2 * mib, 2, 0),
        "pinned_staged": (3, 4 * mib, 3, 0),
    }
    assert sum(copies for copies, *_ in every.values()) == 6


@pytest.mark.filterwarnings("ignore::transfer.FallbackWarning")
def test_build_transfer_counts_a_fallback_once():
    bare = SimulatedAccelerator(events=False)
    with build_transfer({"strategy": "pinned_direct"}, bare) as transfer:
        for _ in range(3):
            transfer.copy(empty(bare), torch.zeros(10))
        assert counts(transfer.stats()) == {
            "pinned_direct": (0, 0, 0, 3),
            "pageable": (3, 60, 3, 0),
        }


def test_a_rule_falls_back_to_the_ring_that_others_use(simulated):
    config = {
        "strategy": "pinned_staged",
        "rules": [{"when": {"at_least": "1MiB"}, "use": "pinned_direct"}],
    }
    with build_transfer(config, simulated) as transfer:
        transfer.copy(empty(simulated, 2**19), torch.zeros(2**19))
        transfer.copy(empty(simulated, 12), torch.zeros(12))
        assert counts(transfer.stats()) == {"pinned_direct": (0, 0, 0, 1), "pinned_staged": (2, 2**20 + 24, 2, 0)}
        assert simulated.pinned_bytes == 2 * 2**24 * 2


def test_a_strategy_without_a_name_is_counted_by_its_class(simulated):
    class Plain(HostToDeviceTransfer):
        def _submit(self, destination, source):
            self.accelerator.enqueue_copy(destination, source)
            self.accelerator.synchronize()
            return InFlightCopy()

    transfer = Plain(accelerator=simulated)
    transfer.copy(empty(simulated), torch.zeros(10))
    assert counts(transfer.stats()) == {"Plain": (1, 20, 0, 0)}
    register_strategy("plain_for_stats", Plain)
    try:
        routed = build_transfer({"strategy": "plain_for_stats"}, simulated)
        routed.copy(empty(simulated), torch.zeros(10))
    finally:
        unregister_strategy("plain_for_stats")
    assert counts(routed.stats()) == {"Plain": (1, 20, 0, 0)}


def test_counts_add_and_subtract():
    first = StrategyStats(3, 60, 4, 1.5, 0.5, 1)
    second = StrategyStats(1, 20, 2, 0.5, 0.25, 1)
    assert first + second == StrategyStats(4, 80, 6, 2.0, 0.75, 2)
    assert first - second == StrategyStats(2, 40, 2, 1.0, 0.25, 0)


class Ranges:
    """The open and all ranges of an accelerator, as DeepSpeed's accelerators take them."""

    def __init__(self, accelerator):
        self.open, self.all = [], []
        accelerator.range_push = self.push
        accelerator.range_pop = self.pop

    def push(self, name):
        self.open.append(name)
        self.all.append(tuple(self.open))

    def pop(self):
        self.open.pop()


def test_the_accelerators_ranges_are_balanced(simulated):
    ranges = Ranges(simulated)
    with build_transfer({"strategy": "pinned_direct"}, simulated) as transfer:
        source = torch.zeros(10)
        transfer.copy(empty(simulated), source)
        assert ranges.open == []
        transfer.prepare(source)
        transfer.copy(empty(simulated), source)
    assert ranges.open == []
    assert ranges.all == [("h2d/pageable",), ("h2d/pinned_direct",)]


def test_the_first_copy_through_build_transfer_is_marked_too(simulated):
    ranges = Ranges(simulated)
    with build_transfer({"strategy": "pinned_staged"}, simulated) as transfer:
        for _ in range(2):
            transfer.copy(empty(simulated), torch.zeros(10))
    assert ranges.all == [("h2d/pinned_staged",)] * 2
    assert ranges.open == []


@pytest.mark.parametrize("error", [OSError("lost"), KeyboardInterrupt()])
def test_ranges_are_closed_by_a_failure(simulated, error):
    ranges = Ranges(simulated)
    for transfer in (
        PageableTransfer(accelerator=simulated),
        PinnedStagedTransfer(accelerator=simulated),
        PinnedDirectTransfer(accelerator=simulated, mapped=False),
        build_transfer({}, simulated),
    ):
        source = simulated.pin_empty(10, dtype=torch.float32).zero_()
        before = len(ranges.all)
        with failing(simulated, "enqueue_copy", error), pytest.raises(type(error)):
            transfer.copy(empty(simulated), source)
        assert len(ranges.all) > before
        assert ranges.open == []
        transfer.close()


def test_a_push_that_fails_is_not_popped(simulated):
    ranges = Ranges(simulated)
    with failing(simulated, "range_push", RuntimeError("no NVTX")), pytest.raises(RuntimeError, match="no NVTX"):
        PageableTransfer(accelerator=simulated).copy(empty(simulated), torch.zeros(10))
    assert ranges.open == []  # a pop too many is an IndexError


def test_an_accelerator_without_ranges_needs_none(simulated):
    reached = []
    with named_range(simulated, "mine"), named_range(None, "mine"):
        reached.append(1)
    assert reached == [1]


def test_torchs_profiler_shows_the_strategies(simulated):
    source = torch.zeros(10)
    with (
        build_transfer({"rules": [{"when": {"smaller_than": 21}, "use": "pinned_direct"}]}, simulated) as transfer,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        transfer.prepare(source)
        transfer.copy(empty(simulated), source)
        transfer.copy(empty(simulated, 2**19), torch.zeros(2**19))
        transfer.copy(empty(simulated, 30), torch.zeros(30))
    seen = {event.key: event.count for event in profile.key_averages() if event.key.startswith("h2d/")}
    assert seen == {"h2d/pinned_direct": 1, "h2d/pinned_staged": 1, "h2d/pageable": 1}
