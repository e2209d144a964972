"""The model against the measured table of one machine, and against schedules worked out by hand."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer import ConfigError, PinnedStagedConfig
from transfer.measured.cost_model import (
    Cost,
    _choose,
    choose,
    expected_seconds,
    interpolated,
    ring_seconds,
    seen_seconds,
    shown,
)
from transfer.measured.profile import MachineProfile

FP32, BF16 = torch.float32, torch.bfloat16
LARGE = 2**28
MACHINE = {"accelerator": "cuda", "device": "NVIDIA H200", "cpu": "Intel Xeon", "cores": 16}
MEASURED = {"date": "2026-11-30", "torch_version": "2.11.0+cu130", "ranks": 1, "threads_per_rank": 16}


class Ring(NamedTuple):
    chunk_elements: int
    buffers: int = 2


def h200(casts_per_second=17.0e9, **fields):
    """One NVIDIA H200 by its parts, each measured alone: nothing here is a whole copy of the table below.

    The wire took 9.7 ms for 512 MiB (55.3 GB/s) in any chunks but small ones. A staging ring of 2 x 2^18 took
    67.6 ms for 1024 chunks, 15.8 of them for the cast: 50 us a chunk are its fixed cost. Adam took 0.367 s for
    0.99 G elements.
    """
    return MachineProfile(
        machine=MACHINE,
        measured=MEASURED,
        wire=[{"chunk_bytes": size, "seconds": 3e-6 + size / 55.3e9} for size in (2**19, 2**22, 2**24, 2**29)],
        host_cast=[{"chunk_elements": 2**22, "elements_per_second": casts_per_second}],
        pageable=[{"elements": 2**20, "seconds": 0.6e-3}, {"elements": LARGE, "seconds": 0.145}],
        staged_chunk_seconds=50e-6,
        direct_chunk_seconds=40e-6,
        latency_seconds=20e-6,
        device_cast_elements_per_second=500e9,
        page_lock_seconds_per_gib=0.052,
        host_update_elements_per_second=2.7e9,
        **fields,
    )


def small(**fields):
    """Round figures: an element is cast in 10 ms, and a byte crosses in 2.5 ms."""
    given = {
        "machine": MACHINE,
        "measured": MEASURED,
        "wire": [{"chunk_bytes": 200, "seconds": 0.5}],
        "host_cast": [{"chunk_elements": 100, "elements_per_second": 100.0}],
        "pageable": [{"elements": 100, "seconds": 3.0}],
        "staged_chunk_seconds": 0.25,
        "direct_chunk_seconds": 0.125,
        "latency_seconds": 0.0625,
        "device_cast_elements_per_second": 400.0,
        "host_update_elements_per_second": 50.0,
    }
    return MachineProfile(**{**given, **fields})


@pytest.mark.parametrize(
    ("casts_per_second", "strategy", "ring", "measured_ms"),
    [
        (17.0e9, "pinned_staged", Ring(2**24), 18.7),
        (17.0e9, "pinned_staged", Ring(2**23), 18.9),
        (17.0e9, "pinned_staged", Ring(2**22, 4), 21.0),
        (17.0e9, "pinned_staged", Ring(2**20), 27.5),
        (17.0e9, "pinned_direct", Ring(2**22), 19.5),
        (17.0e9, "pageable", None, 145),
        (5.0e9, "pinned_staged", Ring(2**26), 58.4),  # 4.6 G elements a second with 4 threads
        (5.0e9, "pinned_direct", Ring(2**22), 19.5),  # needs no host threads
    ],
)
def test_whole_copies_that_were_measured(casts_per_second, strategy, ring, measured_ms):
    cost = expected_seconds(h200(casts_per_second), strategy, ring, LARGE, FP32, BF16)
    assert cost.total_seconds * 1e3 == pytest.approx(measured_ms, rel=0.12)


@pytest.mark.parametrize(
    ("casts_per_second", "deferred", "order"),
    [
        (17.0e9, False, ["pinned_staged", "pinned_direct", "pageable"]),
        (5.0e9, False, ["pinned_direct", "pinned_staged", "pageable"]),
        (17.0e9, True, ["pinned_direct", "pinned_staged", "pageable"]),
        (5.0e9, True, ["pinned_direct", "pinned_staged", "pageable"]),
    ],
)
def test_ranked_as_measured(casts_per_second, deferred, order):
    candidates = {"pageable": None, "pinned_staged": Ring(2**24), "pinned_direct": Ring(2**22)}
    while candidates:
        name, _ = choose(h200(casts_per_second), candidates, LARGE, FP32, BF16, deferred=deferred)
        assert name == order.pop(0)
        del candidates[name]


def test_rings_are_ranked_as_measured():
    """18.7, 18.9, 27.5 and 67.6 ms for two buffers of 2^24, 2^23, 2^20 and 2^18."""
    seconds = [
        expected_seconds(h200(), "pinned_staged", Ring(2**exponent), LARGE, FP32, BF16).total_seconds
        for exponent in (24, 23, 20, 18)
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] * 1e3 == pytest.approx(67.6, rel=0.05)


@pytest.mark.parametrize(
    ("chunks", "fill", "drain", "buffers", "rest", "expected"),
    [
        (1, 2, 3, 2, None, (2, 5)),
        (3, 3, 2, 2, None, (9, 11)),  # filling sets the pace
        (3, 2, 3, 2, None, (7, 11)),  # draining does: the third chunk waits from 4 to 5 for its buffer
        (3, 2, 3, 3, None, (6, 11)),  # with three buffers it does not
        (3, 2, 3, 1, None, (12, 15)),  # nothing overlaps
        (2, 2, 3, 2, (1, 1), (6, 9)),
        (0, 2, 3, 2, (1, 2), (1, 3)),
    ],
)
def test_rings_worked_out_by_hand(chunks, fill, drain, buffers, rest, expected):
    assert ring_seconds(chunks, fill, drain, buffers, rest) == expected


quarters = st.integers(0, 40).map(lambda count: count / 4)  # exact in binary: results can be compared exactly


@given(
    chunks=st.integers(0, 12),
    fill=quarters,
    drain=quarters,
    buffers=st.integers(1, 5),
    shares=st.none() | st.tuples(st.sampled_from([0, 0.25, 0.5, 1]), st.sampled_from([0, 0.25, 0.5, 1])),
)
def test_rings_as_a_schedule_event_by_event(chunks, fill, drain, buffers, shares):
    rest = None if shares is None else (fill * shares[0], drain * shares[1])
    filled, drained = [], []
    for own_fill, own_drain in [(fill, drain)] * chunks + [rest] * (rest is not None):
        index = len(filled)
        free = drained[index - buffers] if index >= buffers else 0
        filled.append(max(filled[-1] if filled else 0, free) + own_fill)
        drained.append(max(drained[-1] if drained else 0, filled[-1]) + own_drain)
    assert ring_seconds(chunks, fill, drain, buffers, rest) == ((filled or [0])[-1], (drained or [0])[-1])


def test_staged_worked_out_by_hand():
    # Filled at 1.25, 2.5 and, half a chunk, 3.25; that half is on the wire for 0.25 and its end seen 0.0625 later.
    cost = expected_seconds(small(), "pinned_staged", Ring(100), 250, FP32, BF16)
    assert cost == Cost(total_seconds=3.5625, host_seconds=3.25)


def test_direct_worked_out_by_hand():
    # 400 bytes cross in 1, and are cast in 0.25: both chunks are there after 2.25, the first queued at 0.125.
    cost = expected_seconds(small(), "pinned_direct", Ring(100), 200, FP32, BF16)
    assert cost == Cost(total_seconds=2.4375, host_seconds=0.25)


def test_a_mapped_source_is_read_in_one_go_at_the_measured_rate():
    class Mapped(NamedTuple):
        chunk_elements: int = 100
        buffers: int = 2
        mapped: bool = True

    # 1,000 elements at 200 a second, the queueing of one piece and the latency; bf16 is half of it on the wire.
    profile = small(mapped_elements_per_second=200.0)
    assert expected_seconds(profile, "pinned_direct", Mapped(), 1000, FP32, BF16) == Cost(0.125 + 5 + 0.0625, 0.125)
    half = expected_seconds(profile, "pinned_direct", Mapped(), 1000, BF16, FP32)
    assert half == Cost(0.125 + 2.5 + 0.0625, 0.125)
    in_chunks = expected_seconds(small(), "pinned_direct", Mapped(), 1000, FP32, BF16)
    assert in_chunks == expected_seconds(profile, "pinned_direct", Ring(100), 1000, FP32, BF16)
    # Where the caller waits at once, chunks cross instead: 10 of 1 s each, the last of which is then cast.
    candidates = {"pinned_direct": Mapped()}
    immediate = choose(profile, candidates, 1000, FP32, BF16, deferred=False).reason
    seconds = expected_seconds(profile, "pinned_direct", Ring(100), 1000, FP32, BF16).total_seconds
    assert f"pinned_direct {shown(seconds)} until" in immediate
    assert seconds > 10
    without_cast = expected_seconds(profile, "pinned_direct", Mapped(), 1000, FP32, FP32)
    assert without_cast == expected_seconds(profile, "pinned_direct", Ring(100), 1000, FP32, FP32)


def test_direct_held_up_by_the_host():
    # Queueing takes 3 a chunk: the second is queued at 6, and there 1.25 later.
    cost = expected_seconds(small(direct_chunk_seconds=3.0), "pinned_direct", Ring(100), 200, FP32, BF16)
    assert cost == Cost(total_seconds=7.3125, host_seconds=6)


@pytest.mark.parametrize(
    ("strategy", "total_seconds"),
    [
        ("pinned_staged", 0.25 + 8 / 6 + 1.0 + 0.0625),  # 8 bytes touched an element, not 6, and 400 to send
        ("pinned_direct", 0.125 + 1.0 + 0.0625),  # no cast
        ("pageable", 3.0 * 8 / 6),
    ],
)
def test_other_dtypes(strategy, total_seconds):
    assert expected_seconds(small(), strategy, Ring(100), 100, FP32, FP32).total_seconds == pytest.approx(total_seconds)


def test_an_empty_copy_costs_nothing():
    for strategy in ("pageable", "pinned_staged", "pinned_direct"):
        assert expected_seconds(small(), strategy, Ring(100), 0, FP32, BF16) == Cost(0, 0)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (10, 2.0),
        (20, 3.0),
        (15, 2.5),
        (40, 7.0),
        (80, 14.0),  # at the rate of the largest
        (5, 1.5),  # a fixed cost of 1 and 0.1 each
        (0.001, 1.0001),
    ],
)
def test_between_and_beyond_what_was_measured(size, seconds):
    assert interpolated([(10, 2.0), (20, 3.0), (40, 7.0)], size) == pytest.approx(seconds)


@pytest.mark.parametrize("points", [[(10, 2.0)], [(10, 2.0), (20, 40.0)]])
def test_never_faster_than_in_proportion_below_the_smallest(points):
    assert interpolated(points, 5) == pytest.approx(1.0)


def test_never_slower_than_the_smallest_below_it():
    assert interpolated([(10, 2.0), (20, 1.0)], 5) == 2.0


@pytest.mark.parametrize(
    ("total", "host", "elements", "seen"),
    [
        (10.0, 2.0, 500, 2.0),  # 10 of updates hide the other 8
        (10.0, 2.0, 100, 8.0),  # 2 of updates hide 2 of them
        (10.0, 10.0, 500, 10.0),  # nothing of a blocking copy can be hidden
    ],
)
def test_what_a_deferred_wait_leaves_to_be_seen(total, host, elements, seen):
    assert seen_seconds(small(), Cost(total, host), elements, deferred=True) == seen
    assert seen_seconds(small(), Cost(total, host), elements, deferred=False) == total


def test_deferring_changes_the_choice():
    # Staged 5.56, 5 of them in `submit`; direct 14.4, of which 20 of updates hide all but the queueing.
    profile = small(device_cast_elements_per_second=30.0, host_update_elements_per_second=20.0)
    candidates = {"pinned_staged": Ring(100), "pinned_direct": Ring(100)}
    assert choose(profile, candidates, 400, FP32, BF16, deferred=False).strategy == "pinned_staged"
    assert choose(profile, candidates, 400, FP32, BF16, deferred=True).strategy == "pinned_direct"


def test_the_reason_quotes_every_candidate():
    candidates = [("pageable", None), ("pinned_staged", Ring(100)), ("pinned_direct", Ring(100))]
    assert choose(small(), candidates, 100, FP32, BF16, deferred=False).reason == (
        "For 100 elements the machine profile expects pinned_direct 1.44 s, pinned_staged 1.81 s, pageable 3.00 s "
        "until the values are there."
    )
    assert choose(small(), candidates, 100, FP32, BF16, deferred=True).reason == (
        "For 100 elements the machine profile expects pinned_direct 125 ms, pinned_staged 1.25 s, pageable 3.00 s "
        "of waiting, with 2.00 s of host updates to hide behind."
    )


def test_the_first_of_equals():
    candidates = [("pinned_staged", Ring(200)), ("pinned_direct", Ring(100))]
    profile = small(staged_chunk_seconds=None, direct_chunk_seconds=None, wire=[{"chunk_bytes": 200, "seconds": 0.25}])
    profile = profile.model_copy(update={"device_cast_elements_per_second": 100 / 0.75})
    # Both 1.25: cast 1, wire 0.25; and wire 0.5, cast 0.75.
    for order in (candidates, candidates[::-1]):
        assert choose(profile, order, 100, FP32, BF16, deferred=False).strategy == order[0][0]


def test_what_the_accelerator_cannot_is_not_chosen():
    profile = small(lacks={"registers_host_memory": "Acme cannot pin existing memory in place."})
    candidates = {"pageable": None, "pinned_direct": Ring(100)}
    name, reason = choose(profile, candidates, 100, FP32, BF16, deferred=False)
    assert name == "pageable"
    assert reason.endswith("; not pinned_direct: Acme cannot pin existing memory in place.")
    assert choose(profile, candidates, 100, FP32, BF16, deferred=False, source_pinned=True)[0] == "pinned_direct"


@pytest.mark.parametrize(
    ("fields", "strategy", "obstacle"),
    [
        ({"lacks": {"pins_host_memory": "No pinning."}}, "pinned_staged", "No pinning."),
        ({"lacks": {"events": "No events."}}, "pinned_staged", "No events."),
        ({"lacks": {"streams": "No streams."}}, "pinned_direct", "No streams."),
        ({"wire": []}, "pinned_staged", "The profile lacks the measurements for pinned_staged."),
        ({"host_cast": []}, "pinned_staged", "The profile lacks the measurements for pinned_staged."),
        ({"device_cast_elements_per_second": None}, "pinned_direct", "The profile lacks the measurements for pinned_"),
        ({}, "polite", "`h2d tune` does not measure polite."),
    ],
)
def test_obstacles(fields, strategy, obstacle):
    cost = expected_seconds(small(**fields), strategy, Ring(100), 100, FP32, BF16)
    assert cost.total_seconds == cost.host_seconds == float("inf")
    assert cost.obstacle.startswith(obstacle)


def test_nothing_possible_still_has_a_reason():
    name, reason = choose(small(), {"polite": None}, 100, FP32, BF16, deferred=True)
    assert name == "polite"
    assert "knows no strategy that can run" in reason
    with pytest.raises(ConfigError, match="no strategy"):
        choose(small(), {}, 100, FP32, BF16, deferred=True)


def test_a_choice_made_before_is_looked_up():
    candidates = {"pageable": None, "pinned_staged": PinnedStagedConfig()}
    first = choose(h200(), candidates, 12345, FP32, BF16, deferred=True)
    hits = _choose.cache_info().hits
    assert choose(h200(), dict(candidates), 12345, FP32, BF16, deferred=True) is first
    assert _choose.cache_info().hits == hits + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0187, "18.7 ms"), (2e-6, "2 us"), (0.00099996, "1 ms"), (0.9996, "1.00 s"), (21.35, "21.35 s"), (0.0, "0 us")],
)
def test_durations_shown(seconds, text):
    assert shown(seconds) == text
