"""A call in the middle of a copy of the same thread, as a signal handler's or a finalizer's, between any two lines."""

import pytest

from tests.running import run_program, succeeds

pytestmark = pytest.mark.slow

PROGRAM = """
import pathlib, sys, tempfile, threading, torch
from accelerators.simulated import SimulatedAccelerator
from transfer import *
from transfer import nvme

way, method, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
SIZE = 3000 if way != "routed" else 530_000  # of bf16, as many as the policy stages
VALUES = torch.arange(float(SIZE))
root = tempfile.mkdtemp()
OURS = str(pathlib.Path(sys.modules["transfer"].__file__).parent)
WAYS = {
    "pageable": lambda device: PageableTransfer(accelerator=device),
    "pinned_staged": lambda device: PinnedStagedTransfer(accelerator=device, chunk_elements=1000),
    "pinned_direct": lambda device: PinnedDirectTransfer(accelerator=device, chunk_elements=1000, mapped=False),
    "mapped": lambda device: PinnedDirectTransfer(accelerator=device),
    "nvme_swapped": lambda device: NvmeSwappedTransfer(accelerator=device, chunk_elements=1024, threads=2),
    "routed": lambda device: build_transfer({}, device),
    "routed to files": lambda device: build_transfer({}, device),
}

def interrupted(call, point, handler):
    '''Calls `handler` before the line number `point` of ours that `call` reaches; returns whether there is one.'''
    lines = [0]
    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == point:
                sys.settrace(None)
                frame.f_trace = None
                handler()
                return None
        return trace
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines[0] >= point

def right(destination):
    return torch.equal(destination, VALUES[:destination.numel()].bfloat16())

busy = copied = refused = 0
point = 1
source = nvme.swap_out(VALUES, root) if "file" in way or way == "nvme_swapped" else VALUES
while True:
    device = SimulatedAccelerator(seed=5)
    outer, inner, last = (device.device_empty(SIZE, dtype=torch.bfloat16) for _ in range(3))
    transfer = WAYS[way](device)
    if isinstance(source, torch.Tensor) and way != "pinned_staged":
        transfer.prepare(source)
    if point % 2:
        transfer.copy(last, source)  # with what it holds made already, and without
    for each in (outer, inner, last):
        each.fill_(-7)
    def handler():
        global busy, copied
        try:
            if method == "close":
                transfer.close()
            else:
                getattr(transfer, method)(inner, source)
                copied += 1
        except TransferBusyError:
            busy += 1
    try:
        reached = interrupted(lambda: transfer.copy(outer, source), point, handler)
    except StrategyUnavailableError:
        # The close inside has given back what was prepared, so that this strategy can no longer make the copy.
        assert method == "close" and way in ("pinned_direct", "mapped")
        device.synchronize()
        assert (outer == -7).all() or right(outer)
        reached, refused = True, refused + 1
    else:
        assert right(outer), (way, point, "the outer copy is wrong")
    device.synchronize()
    assert right(inner) or (inner == -7).all(), (way, point, "the inner copy is half there")
    if isinstance(source, torch.Tensor) and way != "pinned_staged":
        transfer.prepare(source)
    transfer.copy(last, source)
    assert right(last), (way, point, "the next copy is wrong")
    transfer.close()
    assert transfer.pinned_bytes == transfer.scratch_bytes == device.pinned_bytes == 0
    if not reached:
        break
    point += step
assert point > 100, point
print("refused" if busy else "copied" if copied else "closed")
"""


@pytest.mark.parametrize("method", ["submit", "close"])
@pytest.mark.parametrize(
    "way", ["pageable", "pinned_staged", "pinned_direct", "mapped", "nvme_swapped", "routed", "routed to files"]
)
def test_a_call_between_two_lines_of_a_copy(way, method):
    done = run_program(PROGRAM, way, method, 37 if way == "routed" else 13, timeout=250)
    # Nothing of `pageable` is shared, so it copies; what shares buffers says that they are in use.
    succeeds(done, "closed\n" if method == "close" else "copied\n" if way == "pageable" else "refused\n")
