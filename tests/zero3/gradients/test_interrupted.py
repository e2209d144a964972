"""What fails on the way leaves DeepSpeed's state right, and what ends gives everything back: real ZeRO-3."""

import os
import socket

import pytest

from tests.running import run_python
from tests.zero3.gradients import interrupted

# CPU Adam is compiled before.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]


@pytest.mark.parametrize("case", [each.__name__ for each in interrupted.CASES])
def test_what_is_promised_holds(why_no_cpu_adam, case):
    if why_no_cpu_adam is not None:
        pytest.skip(why_no_cpu_adam)
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    done = run_python("-m", interrupted.__name__, case, environment={**os.environ, **alone}, timeout=600, forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
