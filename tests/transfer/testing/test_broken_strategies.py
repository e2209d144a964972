"""The shipped suite passes a sound strategy, and fails each of a list of wrong ones, for the right reason."""

from pathlib import Path

import pytest

from tests.broken import outcomes, wrong_ones

pytestmark = pytest.mark.slow

BROKEN = Path(__file__).with_name("broken.py")
AS_IT_IS, CAST = "[as it is-pinned]", "[cast-pinned]"

#: The test of the suite that must fail, for each strategy of ``broken.py``, and what its one line says.
CAUGHT_BY = {
    "ForgetsToWait": ("test_whatever_memory_the_source_is_in" + AS_IT_IS, "pinned source, float32 to float32"),
    "ForgetsToWaitForPageLockedSources": (
        "test_whatever_memory_the_source_is_in[as it is-prepared]",
        "prepared source, float32 to float32",
    ),
    "WaitsForTheFirstEventOnly": (
        "test_whatever_memory_the_source_is_in" + AS_IT_IS,
        "written after copy had returned",
    ),
    "SaysDoneTooEarly": ("test_done_becomes_true_by_asking" + AS_IT_IS, "when done was true"),
    "NeverSaysDone": ("test_done_becomes_true_by_asking" + AS_IT_IS, "assert False"),
    "CannotBeWaitedForAgain": ("test_wait_is_idempotent_and_done_becomes_true" + AS_IT_IS, "was waited for"),
    "OneElementIsWrong": ("test_equals_a_direct_copy[dtype0]", "element 1000 is 0.5 (0x3f000000), not"),
    "CastsByTruncation": ("test_rounds_to_nearest_even[dtype0-1]", "element 67 is 1.0078125 (0x3f81), not 1.015625"),
    "FlushesSubnormals": ("test_whatever_memory_the_source_is_in" + AS_IT_IS, "is 0.0 (0x00000000), not"),
    "ChangesTheSource": ("test_whatever_memory_the_source_is_in" + AS_IT_IS, "the source itself"),
    "IgnoresStrides": ("test_strided_destination", "every other element"),
    "WritesTheNextElement": ("test_neighbours_are_untouched", "element 2003 is 0.0 (0x00000000), not -77.0"),
    "LeaksPinnedMemory": ("test_close_gives_everything_back" + CAST, "assert"),
    "KeepsABuffer": ("test_close_gives_everything_back" + CAST, "assert"),
    "PinsForEachSize": ("test_pinned_bytes_do_not_grow", "assert"),
    "UnpinsABufferInFlight": ("test_close_gives_everything_back" + AS_IT_IS, "still used by a copy in flight"),
    "ReusesABufferTooEarly": ("test_whatever_memory_the_source_is_in[cast-pageable]", "pageable source"),
    "SharesABufferBetweenThreads": ("test_threads_share_one_transfer", "thread"),
    "KeepsCopyingAfterAnError": ("test_a_failure_is_clean[error]", "neither the old nor the new value"),
    "WritesWhenItFails": ("test_a_failure_is_clean[error]", "neither the old nor the new value"),
    "HoldsItsLockAfterAnError": ("test_a_failure_is_clean[error]", "the lock is held for ever"),
    "SwallowsErrors": ("test_a_failure_is_clean[error]", "nothing was raised"),
    "SwallowsInterrupts": ("test_a_failure_is_clean[interrupt]", "nothing was raised"),
    "RefusesAfterWriting": ("test_it_copies_or_says_why_not", "it should have said so beforehand"),
    "RefusesNothing": ("test_refusals_write_nothing", "DID NOT RAISE"),
    "RemembersTheFirstValues": ("test_a_failure_is_clean[error]", "the copy after an error"),
    "ReleasesTheSourceTooEarly": ("test_the_source_is_free_after_release_source" + AS_IT_IS, "is -77.0"),
    "CopiesWhenItIsWaitedFor": ("test_the_source_is_free_after_release_source" + AS_IT_IS, "is -77.0"),
    "ForgetsTheCurrentStream": ("test_runs_after_work_queued_before_it[cast-pageable]", "pageable source"),
    "ForgetsTheCurrentStreamForPinnedSources": ("test_a_side_stream_is_used_when_current" + AS_IT_IS, "pinned source"),
    "OrdersNothing": ("test_order_after_makes_another_stream_see_the_values" + AS_IT_IS, "on another stream"),
    "OrdersByBlockingTheHost": ("test_order_after_makes_another_stream_see_the_values" + AS_IT_IS, "host wait"),
}


@pytest.fixture(scope="module")
def results():
    return outcomes(BROKEN, {name: test for name, (test, _) in CAUGHT_BY.items()})


def test_a_sound_strategy_passes(results):
    assert {outcome for (strategy, _), (outcome, _) in results.items() if strategy == "Sound"} == {"PASSED"}


@pytest.mark.parametrize("strategy", CAUGHT_BY)
def test_a_wrong_strategy_fails_and_one_line_says_what_is_wrong(results, strategy):
    test, said = CAUGHT_BY[strategy]
    outcome, line = results[strategy, test]
    assert outcome == "FAILED"
    assert said in line


def test_every_wrong_strategy_is_in_the_table():
    assert wrong_ones(BROKEN) - {"Recorded"} == set(CAUGHT_BY)
