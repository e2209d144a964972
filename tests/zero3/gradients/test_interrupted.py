"""What fails on the way leaves DeepSpeed's state right, and what ends gives everything back: real ZeRO-3."""

import pytest

from tests.zero3.gradients import interrupted
from tests.zero3.launching import run_case

# CPU Adam is compiled before.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]


@pytest.mark.parametrize("case", [each.__name__ for each in interrupted.CASES])
def test_what_is_promised_holds(why_no_cpu_adam, case):
    if why_no_cpu_adam is not None:
        pytest.skip(why_no_cpu_adam)
    run_case(interrupted.__name__, case)
