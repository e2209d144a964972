"""Calls that a step of ZeRO-3 makes on the accelerator raise: on a stand-in with DeepSpeed's order of a step."""

import threading

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import ANY_METHOD, failing
from tests.zero3.stand_ins import SteppingStage3
from transfer import TransferError, build_transfer, zero3
from transfer.testing.failures import MAY_DO_WITHOUT

#: The system need not be asked for a budget each time.
SMALL = {"chunk_elements": 3, "max_page_locked": 4096}
DIRECT = {"strategy": "pinned_direct", "pinned_direct": {"mapped": False, **SMALL}, "fallback": False}
MAPPED = {"strategy": "pinned_direct", "pinned_direct": SMALL, "fallback": False}
STAGED = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}, "fallback": False}


def is_old_or_new(partition, before, master):
    return ((partition == before) | (partition == master.bfloat16())).all()


def fail_in_a_step(config, error, after, swapped):
    """The second step fails at one call. Returns the calls that it has made."""
    simulated = SimulatedAccelerator(seed=after)
    optimizer = SteppingStage3(simulated, sub_groups=2)
    if swapped:
        optimizer.use_swap_buffers(simulated)
    others = simulated.pinned_bytes
    transfer = build_transfer(config, simulated)
    zero3.attach(optimizer, transfer)
    optimizer.step()
    before = [partition.clone() for partition in optimizer.fp16_partitioned_groups_flat]
    raised = []
    with failing(simulated, ANY_METHOD, error, after=after) as calls:
        try:
            optimizer.step()
        except (type(error), TransferError) as caught:
            raised.append(caught)
    failed = calls[after] if len(calls) > after else None
    what = f"{error!r} from call {after}, {failed}"
    masters = optimizer.on_disk if swapped else optimizer.fp32_partitioned_groups_flat
    partitions = optimizer.fp16_partitioned_groups_flat
    if not raised:
        assert failed is None or (isinstance(error, Exception) and failed in MAY_DO_WITHOUT), f"{what}: not raised"
        assert all(map(torch.equal, partitions, (master.bfloat16() for master in masters))), what
    elif not swapped:  # what was in the buffer when the step failed is lost with the step
        assert all(map(is_old_or_new, partitions, before, masters)), f"{what}: neither old nor new values"
    for partition in partitions:
        partition.fill_(5)
    simulated.synchronize()
    assert all((partition == 5).all() for partition in partitions), f"{what}: a part arrived after the error"
    optimizer.step()
    for partition, master in zip(partitions, masters, strict=True):
        assert torch.equal(partition, master.bfloat16()), f"{what}: the next step is wrong"
    zero3.detach(optimizer)
    transfer.close()
    assert transfer.pinned_bytes == 0
    assert simulated.pinned_bytes == others, f"{what}: pinned memory was lost"
    return calls


def first_middle_and_last(calls):
    """Positions at which each method is called for the first time, in the middle, and for the last time."""
    positions = {}
    for position, name in enumerate(calls):
        positions.setdefault(name, []).append(position)
    return sorted({each[index] for each in positions.values() for index in (0, len(each) // 2, -1)})


ERROR, INTERRUPT = OSError("the link is down"), KeyboardInterrupt()


@pytest.mark.parametrize(
    ("config", "swapped", "error"),
    [
        (DIRECT, False, ERROR),
        (DIRECT, True, INTERRUPT),
        (MAPPED, False, INTERRUPT),
        (MAPPED, True, ERROR),
        (STAGED, False, INTERRUPT),
        (STAGED, True, ERROR),
    ],
)
def test_a_failure_in_a_step_is_clean(config, swapped, error):
    threads = threading.active_count()
    calls = fail_in_a_step(config, error, 10_000, swapped)
    assert len(calls) > 10, "a step calls the accelerator"
    for after in first_middle_and_last(calls):
        fail_in_a_step(config, error, after, swapped)
    assert threading.active_count() <= threads
