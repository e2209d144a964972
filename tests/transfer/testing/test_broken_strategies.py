"""The shipped suite passes a sound strategy, and fails each of a row of broken ones, for the right reason."""

import re
from pathlib import Path

import pytest

from tests.running import run_python

pytestmark = pytest.mark.slow

BROKEN = Path(__file__).with_name("broken.py")

#: The tests of the suite that must fail, each for a strategy of ``broken.py``.
CAUGHT_BY = {
    "ForgetsToWait": "test_whatever_memory_the_source_is_in[as it is-pinned]",
    "OneElementIsWrong": "test_equals_a_direct_copy[dtype0]",
    "IgnoresStrides": "test_strided_destination",
    "WritesTheNextElement": "test_neighbours_are_untouched",
    "LeaksPinnedMemory": "test_close_gives_everything_back[pageable]",
    "ReusesABufferTooEarly": "test_whatever_memory_the_source_is_in[cast-pageable]",
    "KeepsCopyingAfterAnError": "test_a_failure_is_clean[error]",
    "SwallowsErrors": "test_a_failure_is_clean[error]",
    "ReleasesTheSourceTooEarly": "test_the_source_is_free_after_release_source[as it is-pinned]",
    "ForgetsTheCurrentStream": "test_runs_after_work_queued_before_it",
    "OrdersByBlockingTheHost": "test_order_after_makes_another_stream_see_the_values",
}


@pytest.fixture(scope="module")
def outcomes():
    """Passed, failed or skipped, by the name of the class and of the test."""
    chosen = [f"{BROKEN}::TestSound", *(f"{BROKEN}::Test{name}::{test}" for name, test in CAUGHT_BY.items())]
    options = ["-q", "-rA", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
    done = run_python("-m", "pytest", *options, *chosen, timeout=250, forked=True)
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S+::Test(\w+)::([^\n]+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {(strategy, test): outcome for outcome, strategy, test in found}


def test_a_sound_strategy_passes(outcomes):
    passed = {outcome for (strategy, _), outcome in outcomes.items() if strategy == "Sound"}
    assert passed == {"PASSED"}


@pytest.mark.parametrize("strategy", CAUGHT_BY)
def test_a_broken_strategy_fails(outcomes, strategy):
    assert outcomes[strategy, CAUGHT_BY[strategy]] == "FAILED"


def test_every_broken_strategy_is_in_the_table():
    assert set(re.findall(r"^class Test(\w+)\(TestSound\)", BROKEN.read_text(), re.MULTILINE)) == set(CAUGHT_BY)
