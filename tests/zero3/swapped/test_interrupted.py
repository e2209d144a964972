"""What fails while state passes from files through a step leaves it right, or says what helps: real ZeRO-3."""

import os
import socket

import pytest

from tests.running import run_python
from tests.zero3.swapped import interrupted

# CPU Adam is compiled before.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]


@pytest.mark.parametrize("case", [each.__name__ for each in interrupted.CASES])
def test_what_is_promised_holds(why_no_cpu_adam, tmp_path, case):
    if why_no_cpu_adam is not None:
        pytest.skip(why_no_cpu_adam)
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    environment = {**os.environ, **alone, "CHECKPOINTS": str(tmp_path)}
    done = run_python("-m", interrupted.__name__, case, environment=environment, timeout=600, forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
