"""What fails while state passes from files through a step leaves it right, or says what helps: real ZeRO-3."""

import pytest

from tests.zero3.launching import run_case
from tests.zero3.swapped import interrupted

# CPU Adam is compiled before.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]


@pytest.mark.parametrize("case", [each.__name__ for each in interrupted.CASES])
def test_what_is_promised_holds(why_no_cpu_adam, tmp_path, case):
    if why_no_cpu_adam is not None:
        pytest.skip(why_no_cpu_adam)
    run_case(interrupted.__name__, case, {"CHECKPOINTS": str(tmp_path)})
