"""SIGTERM, with the handler that Python leaves to the system, while a copy waits: the process ends at once."""

import signal
import time

import pytest

from tests.running import run_program

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, threading, time
import torch
from accelerators.simulated import SimulatedAccelerator
from transfer import NvmeSwappedTransfer, PageableTransfer, PinnedDirectTransfer, PinnedStagedTransfer, nvme

which, root = sys.argv[1:]
simulated = SimulatedAccelerator()

def waits(*_, **__):
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    print("waiting", flush=True)
    time.sleep(60)

class Event(type(simulated.Event())):
    synchronize = waits

class Stream(type(simulated.Stream())):
    synchronize = waits

values = torch.arange(4000.0)
destination = simulated.device_empty(4000, dtype=torch.bfloat16)
if which == "read":
    swapped = nvme.swap_out(values, root)
    os.preadv = waits
    NvmeSwappedTransfer(accelerator=simulated).copy(destination, swapped)
elif which == "write":
    os.pwritev = os.pwrite = os.write = os.fsync = os.fdatasync = waits
    nvme.swap_out(values, root)
else:
    queue = simulated._queue
    simulated.Event, simulated.Stream = lambda: Event(queue), lambda: Stream(queue)
    simulated.synchronize = waits
    if which == "pageable":
        queue.default_stream.synchronize = waits
        PageableTransfer(accelerator=simulated).copy(destination, values)
    elif which == "staged":
        PinnedStagedTransfer(accelerator=simulated, chunk_elements=1000).copy(destination, values)
    else:
        transfer = PinnedDirectTransfer(accelerator=simulated, chunk_elements=1000)
        transfer.prepare(values)
        copy = transfer.submit(destination, values)
        copy.release_source() if which == "direct" else transfer.close()
print("went on", flush=True)
"""


@pytest.mark.parametrize("which", ["pageable", "staged", "direct", "close", "read", "write"])
def test_a_process_that_waits_is_ended_by_a_signal(which, tmp_path):
    started = time.monotonic()
    done = run_program(PROGRAM, which, tmp_path, timeout=60)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout.startswith("waiting")
    assert "went on" not in done.stdout
    assert time.monotonic() - started < 30, "it waited for what never comes"
    if which in ("read", "write"):  # the next process finds no more than it would after a crash, and removes that
        again = run_program(
            "import sys, torch; from transfer import nvme; nvme.swap_in(nvme.swap_out(torch.ones(9), sys.argv[1]))",
            tmp_path,
        )
        assert again.returncode == 0, again.stderr
        assert list(tmp_path.iterdir()) == [], "scratch of the process that was ended"
