"""Masters on NVMe: the buffers that their copy-backs leave from, on a stand-in; copies as late as may be."""

import gc

import pytest

from accelerators.testing import failing
from tests.transfer.direct_tools import Recorder
from tests.zero3.stand_ins import Spy
from tests.zero3.swapping import SwappingStage3
from tests.zero3.test_deferred import BEFORE, DIRECT, STAGED, after
from transfer import FallbackWarning, StrategyUnavailableError, build_transfer, zero3

#: Four buffers of twelve fp32 elements.
BUFFERS_BYTES = 4 * 12 * 4


@pytest.fixture(params=[False, True], ids=["plain", "pipelined"])
def optimizer(simulated, tmp_path, request):
    return SwappingStage3(simulated, tmp_path, in_memory=[1], pipelined=request.param)


@pytest.mark.parametrize("config", [DIRECT, STAGED], ids=["direct", "staged"])
def test_each_swapped_master_is_copied_before_its_buffer_is_reused(simulated, optimizer, config):
    zero3.attach(optimizer, build_transfer(config, simulated))
    for steps in (1, 2):
        optimizer.step()
        assert optimizer.seen_at_gather == [after(each, steps) for each in range(3)]
        assert [optimizer.info(each).read().tolist() for each in (0, 2)] == [after(0, steps), after(2, steps)]


def test_the_device_reads_the_buffers_themselves_which_are_page_locked_once(simulated, optimizer):
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)
    in_memory = 8 * 4
    assert simulated.pinned_bytes == BUFFERS_BYTES + in_memory
    recorder = Recorder(simulated)
    for _ in range(2):
        optimizer.step()
    assert recorder.registered == recorder.unregistered == []
    assert transfer.stats()["pinned_direct"].copies == 6
    assert simulated.pinned_bytes == BUFFERS_BYTES + in_memory
    zero3.detach(optimizer)
    assert simulated.pinned_bytes == 0


def test_a_master_in_memory_beside_swapped_ones_hides_behind_the_next_update(simulated, optimizer):
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    optimizer.step()
    assert optimizer.seen_at_update[1] == [after(0), BEFORE, BEFORE], "its buffer was wanted back"
    assert optimizer.seen_at_update[2] == [after(0), BEFORE, BEFORE], "in memory there is no hurry"


def test_buffers_that_were_replaced_are_prepared_anew(simulated, optimizer):
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)
    optimizer.step()
    optimizer.replace_manager()
    assert optimizer.freed == [], "the old buffers are not read any more, but page-locked"
    optimizer.step()
    gc.collect()
    assert optimizer.freed == [[False] * 4], "given back before they were freed"
    assert all(simulated.is_pinned(buffer) for buffer in optimizer.buffers())
    assert optimizer.values() == [after(each, 2) for each in range(3)]
    assert simulated.pinned_bytes == BUFFERS_BYTES + 8 * 4


@pytest.mark.parametrize("in_a_cycle", [False, True], ids=["dropped", "collected"])
@pytest.mark.parametrize("given", [False, True], ids=["built", "given"])
def test_buffers_are_given_back_before_a_dropped_engine_frees_them(simulated, tmp_path, in_a_cycle, given):
    import accelerators

    accelerators.set_accelerator(simulated)
    try:
        optimizer = SwappingStage3(simulated, tmp_path)
        freed = optimizer.freed
        transfer = zero3.attach(optimizer, build_transfer(DIRECT, simulated) if given else DIRECT)
        optimizer.step()
        assert simulated.pinned_bytes == BUFFERS_BYTES
        if in_a_cycle:
            optimizer.engine = [optimizer]
        del optimizer
        gc.collect()
        assert freed == [[False] * 4]
        assert transfer.page_locked_bytes == simulated.pinned_bytes == 0
    finally:
        accelerators.set_accelerator(None)


def test_an_engine_that_was_destroyed_has_given_its_buffers_back(simulated, optimizer):
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    optimizer.step()
    optimizer.destroy()
    assert simulated.pinned_bytes == 0
    del optimizer.optimizer_swapper
    gc.collect()
    assert optimizer.freed == [[False] * 4]


def test_detaching_lets_go_of_the_manager(simulated, optimizer):
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    zero3.detach(optimizer)
    del optimizer.optimizer_swapper
    gc.collect()
    assert optimizer.freed == [[False] * 4]


def test_buffers_that_may_not_be_page_locked_are_copied_all_the_same(simulated, optimizer):
    transfer = build_transfer({**DIRECT, "fallback": True}, simulated)
    with failing(simulated, "register_host_memory", OSError("locked memory limit"), times=99):
        with pytest.warns(FallbackWarning, match="locked memory limit"):
            zero3.attach(optimizer, transfer)
        optimizer.step()
    assert optimizer.values() == [after(each) for each in range(3)]
    assert transfer.stats()["pageable"].copies == 3  # so small ones gain nothing from staging


def test_without_fallback_the_engine_stays_as_it_was(simulated, optimizer):
    with (
        failing(simulated, "register_host_memory", OSError("no"), after=2, times=99),
        pytest.raises(StrategyUnavailableError, match="no"),
    ):
        zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    assert simulated.pinned_bytes == 0
    optimizer.step()
    assert optimizer.calls[:3] == [("deepspeed", each) for each in range(3)]


def test_buffers_are_not_prepared_for_an_order_of_their_own(simulated, optimizer):
    optimizer.zenflow = True
    spy = Spy(simulated)
    zero3.attach(optimizer, spy)
    assert spy.log == []
