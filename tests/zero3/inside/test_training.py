"""Copies that are made in the middle of DeepSpeed's functions: real ZeRO-3 does what it does without, bit for bit."""

import pytest

from tests.zero3.inside import training
from tests.zero3.launching import run_case

# CPU Adam is compiled before.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]


@pytest.mark.parametrize("case", [each.__name__ for each in training.CASES])
def test_everything_is_that_of_deepspeed_and_was_served(why_no_cpu_adam, case):
    if why_no_cpu_adam is not None:
        pytest.skip(why_no_cpu_adam)
    run_case(training.__name__, case)
