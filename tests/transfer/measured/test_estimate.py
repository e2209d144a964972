"""Which strategy a profile expects to be fastest: times between those that were measured, and choices worked out."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer import PinnedDirectConfig, PinnedStagedConfig
from transfer.measured import MachineProfile, fastest
from transfer.measured.estimate import _fastest, format_seconds, interpolated

FP32, BF16 = torch.float32, torch.bfloat16


class Ring(NamedTuple):
    chunk_elements: int
    buffers: int = 2


def timed(strategy, *times, **settings):
    """Each time: elements, and the seconds of `copy`, of `submit`, and from `submit` until the values are there."""
    names = ("elements", "copy_seconds", "submit_seconds", "total_seconds")
    return {"strategy": strategy, "settings": settings, "times": [dict(zip(names, one, strict=True)) for one in times]}


DIRECT = timed("pinned_direct", (100, 4.0, 0.5, 5.0), chunk_elements=10, buffers=2)
STAGED = timed("pinned_staged", (100, 3.0, 2.0, 3.0), chunk_elements=10, buffers=2)
PAGEABLE = timed("pageable", (100, 9.0, 8.0, 8.0))
RINGS = {"pinned_direct": Ring(10), "pinned_staged": Ring(10), "pageable": None}


def profile(*copies, update_seconds=2.0, **fields):
    optimizer = {"name": "Adam", "updates": [{"elements": 100, "seconds": update_seconds}]} if update_seconds else None
    return MachineProfile(
        machine={"accelerator": "cuda", "device": "NVIDIA H200", "cpu": "Intel Xeon", "cores": 16},
        measured={"date": "2026-11-30", "torch_version": "2.11.0", "ranks": 1, "threads_per_rank": 16},
        copies=copies or (DIRECT, STAGED, PAGEABLE),
        optimizer=optimizer,
        **fields,
    )


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (10, 2.0),
        (20, 3.0),
        (15, 2.5),
        (30, 5.0),
        (40, 7.0),
        (80, 15.0),  # the last line goes on
        (5, 2.0),  # as the smallest
    ],
)
def test_between_and_beyond_what_was_measured(size, seconds):
    assert interpolated([(10, 2.0), (20, 3.0), (40, 7.0)], size) == pytest.approx(seconds)


def test_beyond_the_largest_a_time_does_not_fall():
    assert interpolated([(10, 2.0), (20, 1.5)], 1000) == 1.5
    assert interpolated([(10, 2.0)], 1000) == 200.0


@given(
    fixed=st.floats(1e-6, 1.0),
    rate=st.floats(1e-12, 1e-6),
    size=st.integers(2**10, 2**34),
)
def test_a_fixed_cost_and_a_rate_are_found_again(fixed, rate, size):
    points = [(elements, fixed + rate * elements) for elements in (2**10, 2**18, 2**20, 2**26)]
    assert interpolated(points, size) == pytest.approx(fixed + rate * size, rel=1e-6)


def test_a_copy_that_is_waited_for_costs_all_of_it():
    choice = fastest(profile(), RINGS, 100, FP32, BF16, waits=True)
    assert choice.strategy == "pinned_staged"
    assert choice.reason == (
        "For 100 elements the machine profile expects pinned_staged 3.00 s, pinned_direct 4.00 s, pageable 9.00 s "
        "until the values are there."
    )


def test_a_deferred_copy_hides_behind_an_update():
    # direct: 0.5 + max(0, 5 - 0.5 - 2) = 3; staged: 2 + max(0, 3 - 2 - 2) = 2; pageable 8 + 0.
    choice = fastest(profile(), RINGS, 100, FP32, BF16, waits=False)
    assert choice.strategy == "pinned_staged"
    assert choice.reason == (
        "For 100 elements the machine profile expects pinned_staged 2.00 s, pinned_direct 3.00 s, pageable 8.00 s "
        "of waiting, with 2.00 s of host updates to hide behind."
    )
    # With 4.25 of updates, 0.75 of direct is left to be seen; with 4.5 and more, its 0.5 of submit.
    longer = fastest(profile(update_seconds=4.25), RINGS, 100, FP32, BF16, waits=False)
    assert longer.strategy == "pinned_direct"
    assert "pinned_direct 750 ms" in longer.reason
    assert "pinned_direct 500 ms" in fastest(profile(update_seconds=50.0), RINGS, 100, FP32, BF16, waits=False).reason


def test_without_a_measured_optimizer_nothing_hides():
    reason = fastest(profile(update_seconds=None), RINGS, 100, FP32, BF16, waits=False).reason
    assert "pinned_staged 3.00 s, pinned_direct 5.00 s, pageable 8.00 s of waiting." in reason


def test_sizes_change_the_choice():
    crossing = (
        timed("pinned_direct", (10, 5.0, 5.0, 5.0), (110, 6.0, 6.0, 6.0)),
        timed("pageable", (10, 1.0, 1.0, 1.0), (110, 11.0, 11.0, 11.0)),
    )
    names = {"pinned_direct": None, "pageable": None}
    # direct 5 + (n - 10) / 100, pageable n / 10: equal at n = 490 / 9, about 54.4.
    for elements, strategy in ((54, "pageable"), (55, "pinned_direct")):
        assert fastest(profile(*crossing), names, elements, FP32, BF16, waits=True).strategy == strategy


def test_the_first_of_equals():
    same = [timed(name, (100, 1.0, 1.0, 1.0)) for name in ("pinned_staged", "pinned_direct")]
    for order in (["pinned_staged", "pinned_direct"], ["pinned_direct", "pinned_staged"]):
        assert fastest(profile(*same), dict.fromkeys(order), 100, FP32, BF16, waits=True).strategy == order[0]


def test_what_was_not_measured_is_not_chosen_and_the_reason_says_why():
    refused = profile(STAGED, PAGEABLE, not_measured={"pinned_direct": "Acme cannot pin existing memory in place."})
    choice = fastest(refused, {**RINGS, "polite": None}, 100, FP32, BF16, waits=True)
    assert choice.strategy == "pinned_staged"
    assert choice.reason.endswith(
        "; not pinned_direct: Acme cannot pin existing memory in place; not polite: it was not measured."
    )


def test_no_candidate_that_was_measured_is_no_choice():
    assert fastest(profile(PAGEABLE), {"polite": None}, 100, FP32, BF16, waits=True) is None
    assert fastest(profile(), {}, 100, FP32, BF16, waits=True) is None


@pytest.mark.parametrize(
    ("source", "destination", "known"),
    [(FP32, torch.float16, True), (FP32, FP32, False), (BF16, BF16, False), (torch.float64, BF16, False)],
)
def test_only_dtypes_of_the_measured_sizes(source, destination, known):
    assert (fastest(profile(), RINGS, 100, source, destination, waits=True) is not None) is known


def test_a_configuration_that_was_measured_has_its_own_times():
    slow = timed("pinned_staged", (100, 3.0, 3.0, 3.0), chunk_elements=10, buffers=2)
    fast = timed("pinned_staged", (100, 1.0, 1.0, 1.0), chunk_elements=50, buffers=2)
    both = profile(slow, fast)
    assert (
        "pinned_staged 1.00 s until" in fastest(both, {"pinned_staged": Ring(50)}, 100, FP32, BF16, waits=True).reason
    )
    other = fastest(both, {"pinned_staged": Ring(50, 3)}, 100, FP32, BF16, waits=True)
    assert "pinned_staged 3.00 s until the values are there" in other.reason
    assert other.reason.endswith("; pinned_staged was measured with chunk_elements 10, buffers 2.")


def test_the_strategies_own_configurations_are_compared():
    config = PinnedDirectConfig()
    settings = {"chunk_elements": config.chunk_elements, "buffers": config.buffers, "mapped": config.mapped}
    measured = profile(timed("pinned_direct", (100, 1.0, 1.0, 1.0), **settings))
    same = fastest(measured, {"pinned_direct": config}, 100, FP32, BF16, waits=True)
    assert "was measured with" not in same.reason
    other = PinnedDirectConfig(mapped=False)
    assert "was measured with" in fastest(measured, {"pinned_direct": other}, 100, FP32, BF16, waits=True).reason


def test_a_choice_made_before_is_looked_up():
    one, candidates = profile(), {"pageable": None, "pinned_staged": PinnedStagedConfig()}
    first = fastest(one, candidates, 12345, FP32, BF16, waits=True)
    hits = _fastest.cache_info().hits
    assert fastest(one, dict(candidates), 12345, FP32, BF16, waits=True) is first
    assert _fastest.cache_info().hits == hits + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0187, "18.7 ms"), (2e-6, "2 us"), (0.00099996, "1 ms"), (0.9996, "1.00 s"), (21.35, "21.35 s"), (0.0, "0 us")],
)
def test_durations_as_text(seconds, text):
    assert format_seconds(seconds) == text
