"""The shipped suite passes a sound accelerator, and fails each of a list of wrong ones, for the right reason."""

from pathlib import Path

import pytest

from tests.broken import outcomes, wrong_ones

pytestmark = pytest.mark.slow

BROKEN = Path(__file__).with_name("broken.py")

#: The test of the suite that must fail, for each accelerator of ``broken.py``.
CAUGHT_BY = {
    "EventsEndTooEarly": "test_an_event_covers_the_copies_before_it",
    "SynchronizedEventsAreNotDone": "test_an_event_covers_the_copies_before_it",
    "QueryIsAlwaysTrue": "test_query_tells_the_truth",
    "EventsMarkTheDefaultStream": "test_an_event_marks_the_current_stream",
    "StreamsWaitForNoEvent": "test_a_stream_waits_for_an_event_of_another",
    "EverythingIsPinned": "test_is_pinned_tells_pinned_from_pageable",
    "NothingIsPinned": "test_is_pinned_tells_pinned_from_pageable",
    "PinsNothing": "test_is_pinned_tells_pinned_from_pageable",
    "IgnoresTheStream": "test_stream_context_is_current_and_restored",
    "NeverLeavesTheStream": "test_stream_context_is_current_and_restored",
    "StaysInTheStreamAfterAnError": "test_stream_context_is_left_after_an_error",
    "CopiesOnTheDefaultStream": "test_copies_run_on_the_current_stream",
    "OneCurrentStreamForAllThreads": "test_the_current_stream_is_the_threads_own",
    "CurrentStreamOfAnotherDevice": "test_the_current_stream_of_the_device_is_the_one_in_use",
    "QueuedCopiesBlock": "test_enqueue_copy_from_pinned_memory_does_not_block",
    "QueuedCopiesNeverRun": "test_enqueue_copy_from_pinned_memory",
    "BlockingCopiesDoNotBlock": "test_the_source_may_change_after_a_copy_that_blocks",
    "CastsByTruncation": "test_enqueue_copy_from_pageable_memory[dtype1]",
    "WritesPastTheEnd": "test_enqueue_copy_writes_nothing_else",
    "RegisteringDoesNothing": "test_registering_pins_memory_in_place",
    "UnregisteringDoesNothing": "test_registering_pins_memory_in_place",
    "RegistersTheSameMemoryTwice": "test_a_refused_registration_leaves_nothing_behind",
    "SynchronizeDoesNothing": "test_enqueue_copy_from_pinned_memory",
    "SynchronizeWaitsForTheCurrentStream": "test_synchronize_waits_for_every_stream",
    "DeviceMemoryIsHostMemory": "test_device_memory_is_on_the_device",
    "PromisesEventsThatItLacks": "test_capabilities_agree_with_what_is_there",
    "LacksAReason": "test_capabilities_agree_with_what_is_there",
}


@pytest.fixture(scope="module")
def results():
    return outcomes(BROKEN, CAUGHT_BY)


def test_a_sound_accelerator_passes(results):
    assert {outcome for (name, _), (outcome, _) in results.items() if name == "Sound"} == {"PASSED"}


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_wrong_accelerator_fails(results, name):
    assert results[name, CAUGHT_BY[name]][0] == "FAILED"


def test_every_wrong_accelerator_is_in_the_table():
    assert wrong_ones(BROKEN) == set(CAUGHT_BY)
