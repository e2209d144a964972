"""A graph that is being recorded, and events that never answer: no transfer is lost."""

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from transfer import (
    GraphCaptureError,
    NvmeSwappedTransfer,
    PageableTransfer,
    PinnedDirectTransfer,
    PinnedStagedTransfer,
    TransferError,
    build_transfer,
    nvme,
)

WAYS = {
    "pageable": lambda device: PageableTransfer(accelerator=device),
    "staged": lambda device: PinnedStagedTransfer(accelerator=device, chunk_elements=300),
    "direct": lambda device: PinnedDirectTransfer(accelerator=device, chunk_elements=300, mapped=False),
    "mapped": lambda device: PinnedDirectTransfer(accelerator=device),
    "routed": lambda device: build_transfer({"strategy": "pinned_direct"}, device),
    "file": lambda device: NvmeSwappedTransfer(accelerator=device, chunk_elements=2**10),
}
VALUES = torch.arange(1000.0)


@pytest.fixture(params=WAYS)
def way(request, simulated, tmp_path):
    """A transfer, and a source that it takes."""
    transfer = WAYS[request.param](simulated)
    source = nvme.swap_out(VALUES, tmp_path) if request.param == "file" else VALUES.clone()
    if isinstance(source, torch.Tensor):
        transfer.prepare(source)
    yield transfer, source
    transfer.close()
    assert transfer.pinned_bytes == transfer.scratch_bytes == simulated.pinned_bytes == 0


def arrives(simulated, transfer, source):
    destination = simulated.device_empty(1000, dtype=torch.bfloat16)
    transfer.copy(destination, source)
    assert torch.equal(destination, VALUES.bfloat16())


@pytest.mark.parametrize("method", ["submit", "copy"])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_while_a_graph_is_recorded_is_refused(simulated, way, method, used):
    transfer, source = way
    destination = simulated.device_empty(1000, dtype=torch.bfloat16)
    destination.fill_(-7)
    if used:
        arrives(simulated, transfer, source)
    before = transfer.pinned_bytes, transfer.scratch_bytes
    waits = []
    simulated.synchronize = lambda index=None: waits.append(index)
    with simulated.capturing(), pytest.raises(GraphCaptureError, match="simulated records a graph") as caught:
        getattr(transfer, method)(destination, source)
    assert isinstance(caught.value, TransferError | RuntimeError)
    assert not waits, "a wait would spoil the graph"
    del simulated.synchronize
    assert before == (transfer.pinned_bytes, transfer.scratch_bytes)
    simulated.synchronize()
    assert (destination == -7).all()
    arrives(simulated, transfer, source)


def test_a_refused_copy_leaves_the_one_in_flight_alone(simulated, way):
    transfer, source = way
    first, second = (simulated.device_empty(1000, dtype=torch.bfloat16) for _ in range(2))
    copy = transfer.submit(first, source)
    with simulated.capturing(), pytest.raises(GraphCaptureError):
        transfer.submit(second, source)
    copy.wait()
    assert torch.equal(first, VALUES.bfloat16())
    arrives(simulated, transfer, source)


@pytest.mark.parametrize("method", ["prepare", "unprepare"])
@pytest.mark.parametrize("make", [WAYS["mapped"], WAYS["routed"]], ids=["alone", "routed"])
def test_page_locking_while_a_graph_is_recorded_is_refused(simulated, make, method):
    """The driver would end the capture; `unprepare` would wait, too."""
    transfer, source = make(simulated), VALUES.clone()
    if method == "unprepare":
        transfer.prepare(source)
    before = simulated.pinned_bytes
    with simulated.capturing(), pytest.raises(GraphCaptureError, match="records a graph"):
        getattr(transfer, method)(source)
    assert simulated.pinned_bytes == transfer.page_locked_bytes == before
    getattr(transfer, method)(source)
    assert simulated.pinned_bytes == VALUES.nbytes - before
    with simulated.capturing():
        if method == "prepare":
            transfer.prepare(source)  # nothing is left to do
    transfer.close()


class Deaf(SimulatedAccelerator):
    """Events that are made while it is deaf never answer, though their work is done."""

    deaf = True

    def __init__(self):
        super().__init__(seed=3)
        make = self.Event

        def event():
            made = make()
            if self.deaf:
                made.query = made.synchronize = self.refuse
            return made

        self.Event = event

    def refuse(self):
        raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")


def deaf(way_name, directory):
    device = Deaf()
    transfer = WAYS[way_name](device)
    source = nvme.swap_out(VALUES[:200], directory) if way_name == "file" else VALUES[:200].clone()
    if way_name != "file":
        transfer.prepare(source)
    destination = device.device_empty(200, dtype=torch.bfloat16)
    return device, transfer, source, destination


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("way_name", [name for name in WAYS if name != "pageable"])
def test_an_event_that_never_answers_costs_one_copy_and_no_transfer(tmp_path, way_name, kept):
    device, transfer, source, destination = deaf(way_name, tmp_path)
    copy = transfer.submit(destination, source)
    device.deaf = False
    if not kept:
        del copy
    for _ in range(2):
        another = device.device_empty(200, dtype=torch.bfloat16)
        transfer.copy(another, source)
        assert torch.equal(another, VALUES[:200].bfloat16())
    if kept:
        with pytest.raises(RuntimeError, match="not permitted on an event"):
            copy.wait()
        copy.wait()
        assert copy.done
        assert torch.equal(destination, VALUES[:200].bfloat16())
    if way_name != "file":
        transfer.unprepare(source)
    transfer.close()
    assert transfer.pinned_bytes == transfer.scratch_bytes == device.pinned_bytes == 0
    transfer.close()


@pytest.mark.parametrize("way_name", [name for name in WAYS if name != "pageable"])
def test_a_close_waits_for_a_device_whose_events_never_answer(tmp_path, way_name):
    device, transfer, source, destination = deaf(way_name, tmp_path)
    transfer.submit(destination, source)
    transfer.close()
    assert transfer.pinned_bytes == transfer.scratch_bytes == device.pinned_bytes == 0
    assert torch.equal(destination, VALUES[:200].bfloat16())
