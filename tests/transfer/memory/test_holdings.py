"""What is held is closed, whenever that is asked for and whatever fails."""

import pytest
import torch

from transfer import NvmeSwappedTransfer, PinnedDirectTransfer, PinnedStagedTransfer, build_transfer, nvme
from transfer.errors import run_all


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("method", ["pin_empty", "is_pinned"])
def test_a_close_while_a_ring_opens_is_done_after_the_copy(simulated, method, routed):
    if routed:
        config = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 100}}
        transfer = build_transfer(config, simulated)
    else:
        transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=100)
    original = getattr(simulated, method)
    setattr(simulated, method, lambda *args, **options: (transfer.close(), original(*args, **options))[1])
    destination = simulated.device_empty(1000, dtype=torch.bfloat16)
    transfer.copy(destination, torch.full((1000,), 3.0))
    assert (destination == 3).all()
    assert simulated.pinned_bytes == transfer.pinned_bytes == 0


def test_a_close_while_scratch_streams_are_made_is_done_after_the_copy(simulated, tmp_path):
    transfer = NvmeSwappedTransfer(accelerator=simulated, chunk_elements=1024, buffers=2, threads=1)
    swapped = nvme.swap_out(torch.full((1000,), 3.0), tmp_path)
    make = simulated.Stream
    simulated.Stream = lambda: (transfer.close(), make())[1]
    destination = simulated.device_empty(1000, dtype=torch.bfloat16)
    transfer.copy(destination, swapped)
    assert (destination == 3).all()
    assert simulated.pinned_bytes == transfer.pinned_bytes == transfer.scratch_bytes == 0


def test_a_close_inside_an_unprepare_is_done(simulated):
    transfer = PinnedDirectTransfer(accelerator=simulated, chunk_elements=100, mapped=False)
    sources = [torch.full((1000,), float(value)) for value in (1, 2)]
    destination = simulated.device_empty(1000, dtype=torch.bfloat16)
    for source in sources:
        transfer.prepare(source)
        transfer.copy(destination, source)
    unregister = simulated.unregister_host_memory
    simulated.unregister_host_memory = lambda address: (transfer.close(), unregister(address))[1]
    transfer.unprepare(sources[0])
    assert simulated.pinned_bytes == transfer.pinned_bytes == transfer.scratch_bytes == 0


def test_the_first_error_is_raised_and_everything_is_tried():
    tried = []

    def fails(error):
        tried.append(error)
        raise error

    errors = [KeyboardInterrupt(), RuntimeError("later")]
    with pytest.raises(KeyboardInterrupt):
        run_all([lambda: tried.append(None), *(lambda error=error: fails(error) for error in errors)])
    assert tried == [None, *errors]


def test_an_interrupted_copy_gives_the_lock_back(simulated):
    """While the exception lives, as in an interactive session."""
    transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=100)
    destination = simulated.device_empty(1000, dtype=torch.bfloat16)
    enqueue = simulated.enqueue_copy

    def interrupted(*_tensors):
        raise KeyboardInterrupt

    simulated.enqueue_copy = interrupted
    try:
        transfer.copy(destination, torch.zeros(1000))
    except KeyboardInterrupt:
        simulated.enqueue_copy = enqueue
        transfer.close()
        assert simulated.pinned_bytes == 0
        transfer.copy(destination, torch.full((1000,), 4.0))
    assert (destination == 4).all()
    transfer.close()
