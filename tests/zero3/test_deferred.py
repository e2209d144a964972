"""When copies of a step are finished: on a stand-in with DeepSpeed's order of a step, copies as late as may be."""

import gc

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from tests.zero3.stand_ins import Spy, Stage3, SteppingStage3, UpdatesTwice, engine_of
from transfer import FallbackWarning, InvalidTensorError, TransferConfig, build_transfer, zero3
from transfer.memory.own_memory import LEAST_BYTES
from transfer.zero3 import stage3

DIRECT = {"strategy": "pinned_direct", "pinned_direct": {"mapped": False, "chunk_elements": 3}, "fallback": False}
STAGED = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}
BEFORE = [-1.0] * 8


def after(sub_group_id, steps=1):
    """What a partition of the stand-in holds after so many steps."""
    return [float(value + sub_group_id + steps) for value in range(8)]


@pytest.fixture(params=[DIRECT, STAGED], ids=["direct", "staged"])
def config(request):
    return request.param


@pytest.fixture
def optimizer(simulated):
    return SteppingStage3(simulated, sub_groups=3)


def test_copies_run_behind_the_next_update_and_are_finished_before_parameters_are_gathered(simulated, optimizer):
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    optimizer.step()
    first_update, second_update, third_update = optimizer.seen_at_update
    assert first_update == [BEFORE] * 3
    assert second_update[0] == BEFORE, "submitted, and not waited for"
    assert third_update[:2] == [BEFORE] * 2
    assert optimizer.seen_at_gather == [after(0), after(1), after(2)]
    assert optimizer.values() == optimizer.seen_at_gather


def test_immediate_completion_waits_in_each_copy_back(simulated, optimizer, config):
    zero3.attach(optimizer, build_transfer({**config, "completion": "immediate"}, simulated))
    optimizer.step()
    assert optimizer.seen_at_update[1] == [after(0), BEFORE, BEFORE]
    assert optimizer.seen_at_update[2] == [after(0), after(1), BEFORE]
    assert optimizer.values() == [after(0), after(1), after(2)]


def test_completion_is_the_configurations(simulated):
    assert TransferConfig().completion == "deferred"
    assert build_transfer({"completion": "immediate"}, simulated).config.completion == "immediate"


@pytest.mark.parametrize("error", [RuntimeError("diverged"), KeyboardInterrupt()])
def test_an_exception_in_the_optimizer_leaves_nothing_in_flight(simulated, optimizer, config, error):
    zero3.attach(optimizer, build_transfer(config, simulated))
    optimizer.raise_at = (2, error)
    with pytest.raises(type(error)) as raised:
        optimizer.step()
    assert raised.value is error
    assert optimizer.values() == [after(0), after(1), BEFORE]
    assert not simulated._queue.pending_tensors()
    optimizer.raise_at = None
    optimizer.step()
    assert optimizer.values() == [after(0, 2), after(1, 2), after(2, 2)]  # the update that raised had been made


def test_an_update_waits_for_the_copy_that_reads_its_master(simulated):
    """Else that copy would bring values of the update that failed."""
    optimizer = UpdatesTwice(simulated)
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    with pytest.raises(RuntimeError, match="diverged"):
        optimizer.step()
    assert optimizer.values()[0] == after(0)


def test_a_step_that_copies_nothing_is_a_step(simulated, optimizer, config):
    zero3.attach(optimizer, build_transfer(config, simulated))
    optimizer.overflow = True
    optimizer.step()
    assert optimizer.values() == [BEFORE] * 3
    optimizer.overflow = False
    optimizer.step()
    assert optimizer.values() == [after(0), after(1), after(2)]


def test_a_copy_back_outside_of_a_step_is_finished_when_it_returns(simulated, optimizer, config):
    """As when a checkpoint is loaded."""
    zero3.attach(optimizer, build_transfer(config, simulated))
    optimizer.step()
    optimizer.fp32_partitioned_groups_flat[1].data.fill_(7)
    optimizer._reassign_or_swap_out_partitioned_parameters(1)
    assert optimizer.values()[1] == [7.0] * 8


@pytest.mark.parametrize("leave", ["destroy", "detach", "uninstall"])
def test_leaving_in_mid_flight_finishes_and_gives_back(simulated, optimizer, config, leave):
    transfer = build_transfer(config, simulated)
    zero3.attach(optimizer, transfer)

    def leave_now():
        if leave == "uninstall":
            zero3.uninstall()  # of what attach was called for, nothing is undone
            zero3.detach(optimizer)
        else:
            optimizer.destroy() if leave == "destroy" else zero3.detach(optimizer)
        assert optimizer.values()[:2] == [after(0), after(1)]

    optimizer.call_at = (2, leave_now)
    optimizer.step()
    assert optimizer.calls[-2:] == [("deepspeed", 2), "post"], "the third copy-back is DeepSpeed's own again"
    transfer.close()
    assert simulated.pinned_bytes == 0


def test_attaching_another_transfer_in_mid_flight_finishes_the_copies_of_the_first(simulated, optimizer, config):
    second = build_transfer(STAGED, simulated)
    zero3.attach(optimizer, build_transfer(config, simulated))
    optimizer.call_at = (2, lambda: zero3.attach(optimizer, second))
    optimizer.step()
    assert optimizer.values() == [after(0), after(1), after(2)]


def test_masters_are_page_locked_at_attach_and_again_when_rebound(simulated, optimizer):
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)
    assert simulated.pinned_bytes == transfer.page_locked_bytes == 3 * 32
    optimizer.step()
    optimizer.fp32_partitioned_groups_flat[1].data = torch.full((8,), 40.0)
    gc.collect()
    assert simulated.pinned_bytes == 2 * 32, "the old storage is gone, and with it its registration"
    optimizer.step()
    assert optimizer.values() == [after(0, 2), [41.0] * 8, after(2, 2)]
    assert simulated.pinned_bytes == 3 * 32
    zero3.detach(optimizer)
    assert simulated.pinned_bytes == 0, "a caller's transfer gives the masters back"
    assert transfer.stats()["pinned_direct"].copies == 6


def test_zero3_moves_the_masters_that_will_be_page_locked(simulated):
    numel = LEAST_BYTES // 4

    def made():
        optimizer = SteppingStage3(simulated)
        optimizer.fp32_partitioned_groups_flat = [torch.nn.Parameter(torch.arange(float(numel))) for _ in range(2)]
        optimizer.fp16_partitioned_groups_flat = [simulated.device_empty(numel, dtype=torch.bfloat16) for _ in range(2)]
        return optimizer, [each.data_ptr() for each in optimizer.fp32_partitioned_groups_flat]

    for config, moves in (("pinned_direct", True), ("pinned_staged", False)):
        optimizer, before = made()
        view = optimizer.fp32_partitioned_groups_flat[1][:3]
        transfer = build_transfer({"strategy": config}, simulated)
        zero3.attach(optimizer, transfer)
        after = [each.data_ptr() for each in optimizer.fp32_partitioned_groups_flat]
        assert [was != now for was, now in zip(before, after, strict=True)] == [moves, False]
        assert transfer.page_locked_bytes == (2 * 4 * numel if moves else 0)
        optimizer.step()
        expected = torch.arange(float(numel)).add(1).bfloat16()
        assert all(torch.equal(each, expected) for each in optimizer.fp16_partitioned_groups_flat)
        assert view.tolist() == [1, 2, 3]
        zero3.detach(optimizer)
        assert transfer.page_locked_bytes == 0
        assert torch.equal(optimizer.fp32_partitioned_groups_flat[0].detach(), torch.arange(float(numel)).add(1))
        transfer.close()
    assert simulated.pinned_bytes == 0


def test_an_accelerator_that_does_not_tell_what_is_pinned_is_served_without_page_locks(simulated, optimizer):
    def does_not_tell(_tensor):
        raise RuntimeError("unknown pointer")

    simulated.is_pinned = does_not_tell
    transfer = build_transfer({**DIRECT, "fallback": True}, simulated)
    with pytest.warns(FallbackWarning, match="unknown pointer"):
        zero3.attach(optimizer, transfer)
    optimizer.step()
    assert optimizer.values() == [after(0), after(1), after(2)]


def test_the_transfer_is_asked_in_each_step(simulated, optimizer):
    """It alone knows what it holds: what an attachment knew would be wrong after `close`, or once memory is free."""
    spy = Spy(simulated)
    zero3.attach(optimizer, spy)
    assert [entry[1] for entry in spy.log if entry[0] == "prepare"] == [0.0, 1.0, 2.0]
    optimizer.step()
    assert [entry[1] for entry in spy.log if entry[0] == "prepare"][3:] == [1.0, 2.0, 3.0]


def counts(transfer):
    return {name: stats.copies for name, stats in transfer.stats().items() if stats.copies}


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("how", ["another engine destroyed", "closed between steps"])
def test_a_transfer_that_was_closed_page_locks_again(simulated, fallback, how):
    one, other = SteppingStage3(simulated), SteppingStage3(simulated)
    transfer = build_transfer({**DIRECT, "fallback": fallback}, simulated)
    for each in (one, other):
        zero3.attach(engine_of(each), transfer)
    other.step()
    if how == "closed between steps":
        transfer.close()
    else:
        one.destroy()
    for _ in range(2):
        other.step()
    assert counts(transfer) == {"pinned_direct": 6}
    assert other.values() == [after(0, 3), after(1, 3)]
    zero3.detach(engine_of(one))
    zero3.detach(engine_of(other))
    assert simulated.pinned_bytes == 0


def test_a_refusal_that_passes_is_forgotten(simulated, optimizer):
    simulated.pin_limit_bytes = 0
    transfer = build_transfer({**DIRECT, "fallback": True}, simulated)
    with pytest.warns(FallbackWarning):
        zero3.attach(optimizer, transfer)
    optimizer.step()
    assert transfer.page_locked_bytes == 0
    simulated.pin_limit_bytes = None
    optimizer.step()
    assert transfer.page_locked_bytes == 3 * 32
    assert counts(transfer)["pinned_direct"] == 3


def test_a_master_that_was_replaced_is_given_back_though_its_storage_lives(simulated, optimizer):
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)
    kept = []
    for _ in range(3):
        kept.append(optimizer.fp32_partitioned_groups_flat[0])
        optimizer.fp32_partitioned_groups_flat[0] = kept[-1].clone()
        optimizer.step()
        assert transfer.page_locked_bytes == simulated.pinned_bytes == 3 * 32
    zero3.detach(optimizer)
    assert simulated.pinned_bytes == 0


def test_two_masters_in_one_storage_keep_it_page_locked(simulated, optimizer):
    both = torch.arange(16.0)
    optimizer.fp32_partitioned_groups_flat[:2] = [both[:8], both[8:]]
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)
    optimizer.fp32_partitioned_groups_flat[0] = torch.arange(8.0)
    optimizer.step()
    assert simulated.is_pinned(both)
    assert counts(transfer) == {"pinned_direct": 3}
    zero3.detach(optimizer)
    assert simulated.pinned_bytes == 0


def test_swap_buffers_are_released_before_deepspeed_reuses_them(simulated, optimizer):
    """As with NVMe: each master lies in a pinned buffer that the next sub-group overwrites."""
    optimizer.use_swap_buffers(simulated)
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)
    optimizer.step()
    assert optimizer.values() == [after(0), after(1), after(2)]
    assert transfer.stats()["pinned_direct"].copies == 3
    assert transfer.page_locked_bytes == 0, "the buffers belong to others"


def test_zenflow_waits_at_once(simulated, optimizer, config):
    optimizer.zenflow = True
    transfer = build_transfer({**config, "fallback": True}, simulated)
    zero3.attach(optimizer, transfer)
    optimizer.step()
    assert optimizer.seen_at_update[2] == [after(0), after(1), BEFORE]
    assert transfer.page_locked_bytes == 0, "they move their masters into shared memory"


def in_shared_memory(optimizer):
    """As SuperOffload leaves its masters: the storage stays, and its memory is another one."""
    optimizer.superoffload_cpu_optimizer = object()
    for master in optimizer.fp32_partitioned_groups_flat:
        master.share_memory_()


def test_superoffload_is_deferred_and_page_locked_once_masters_are_shared(simulated, optimizer, config):
    optimizer.superoffload_cpu_optimizer = object()
    transfer = build_transfer({**config, "fallback": True}, simulated)
    zero3.attach(optimizer, transfer)
    optimizer.step()
    assert transfer.page_locked_bytes == 0, "they will be moved into shared memory"
    in_shared_memory(optimizer)
    optimizer.step()
    waited_for = [after(0, 2), after(1, 2), after(2)]
    assert optimizer.seen_at_update[5] != waited_for
    assert optimizer.seen_at_gather == [after(each, 2) for each in range(3)]
    assert transfer.page_locked_bytes == (3 * 8 * 4 if config is DIRECT else 0)
    zero3.detach(optimizer)
    assert transfer.page_locked_bytes == 0


def test_a_superoffload_that_was_not_read_waits_at_once(simulated, optimizer, monkeypatch, caplog):
    in_shared_memory(optimizer)
    monkeypatch.setattr("deepspeed.__version__", "0.18.1")
    with caplog.at_level("INFO", "transfer"):
        zero3.attach(optimizer, build_transfer(DIRECT, simulated))
        optimizer.step()
    assert optimizer.seen_at_update[2] == [after(0), after(1), BEFORE]
    assert "waits at once: SuperOffload's step in DeepSpeed 0.18.1 was not read" in caplog.text


def test_a_copy_that_is_refused_ends_the_step_with_its_error(simulated, optimizer, config):
    zero3.attach(optimizer, build_transfer(config, simulated))
    good = optimizer.fp16_partitioned_groups_flat[2]
    optimizer.fp16_partitioned_groups_flat[2] = simulated.device_empty(3, dtype=torch.bfloat16)
    with pytest.raises(InvalidTensorError):
        optimizer.step()
    optimizer.fp16_partitioned_groups_flat[2] = good
    assert optimizer.values()[:2] == [after(0), after(1)]


def test_an_error_in_waiting_reaches_the_loop_and_the_other_copies_are_finished(simulated, optimizer):
    from accelerators.testing import failing

    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    with failing(simulated, "Event.synchronize", OSError("the link is down")), pytest.raises(OSError, match="link"):
        optimizer.step()
    simulated.synchronize()
    assert optimizer.values() == [after(0), after(1), after(2)]
    optimizer.step()
    assert optimizer.values() == [after(0, 2), after(1, 2), after(2, 2)]


def test_two_engines_keep_their_copies_apart(simulated):
    one, other = SteppingStage3(simulated), SteppingStage3(simulated)
    transfer = build_transfer(DIRECT, simulated)
    for each in (one, other):
        zero3.attach(engine_of(each), transfer)
    one.call_at = (1, other.step)
    one.step()
    assert other.values() == [after(0), after(1)]
    assert one.values() == [after(0), after(1)]


class Looks(SteppingStage3):
    """A user's subclass that looks at a partition after its copy-back."""

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
        super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        self.seen = [*getattr(self, "seen", []), self.values()[sub_group_id]]


def test_a_subclass_that_looks_right_after_a_copy_back_sees_it_finished(simulated, config, monkeypatch):
    monkeypatch.setattr(stage3, "optimizer_classes", lambda: [Stage3, SteppingStage3])
    optimizer = Looks(simulated, sub_groups=3)
    zero3.attach(optimizer, build_transfer(config, simulated))
    optimizer.step()
    assert optimizer.seen == [after(0), after(1), after(2)]


def test_a_wrapper_of_the_update_sees_finished_copies(simulated, optimizer, config):
    zero3.attach(optimizer, build_transfer(config, simulated))
    update, seen = SteppingStage3._optimizer_step, []

    def looking(self, sub_group_id):
        seen.append(self.values()[:sub_group_id])
        update(self, sub_group_id)

    SteppingStage3._optimizer_step = looking
    try:
        optimizer.step()
    finally:
        SteppingStage3._optimizer_step = update
    assert seen == [[], [after(0)], [after(0), after(1)]]


def test_an_interrupt_between_a_submit_and_its_bookkeeping_leaves_nothing_in_flight(simulated, optimizer):
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)
    submit, calls = transfer.submit, []

    def interrupted(destination, source):
        copy = submit(destination, source)
        calls.append(copy)
        if len(calls) == 2:
            del copy
            raise KeyboardInterrupt
        return copy

    transfer.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert not simulated._queue.pending_tensors()
    assert optimizer.values() == [after(0), after(1), BEFORE]


def test_a_master_that_moves_under_its_storage_is_page_locked_where_it_is(simulated, optimizer):
    transfer = build_transfer({**DIRECT, "fallback": True}, simulated)
    zero3.attach(optimizer, transfer)
    optimizer.fp32_partitioned_groups_flat[1].data.share_memory_()
    optimizer.step()
    assert optimizer.values() == [after(0), after(1), after(2)]
    assert transfer.stats()["pinned_direct"].copies == 3
    assert simulated.is_pinned(optimizer.fp32_partitioned_groups_flat[1])
    assert simulated.pinned_bytes == transfer.page_locked_bytes


def test_partitions_that_are_offloaded_as_a_whole_are_no_obstacle(simulated, optimizer):
    partitions = list(optimizer.fp16_partitioned_groups_flat)
    optimizer.fp16_partitioned_groups_flat.clear()  # as offload_states does
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    optimizer.fp16_partitioned_groups_flat.extend(partitions)
    optimizer.step()
    assert optimizer.values() == [after(0), after(1), after(2)]


def test_a_monitor_that_fails_does_not_end_the_step(simulated, optimizer, caplog):
    class Monitor:
        enabled = True

        def write_events(self, events):
            raise OSError("disk full")

    class Engine:
        monitor, global_samples, global_rank = Monitor(), 0, 0

        def __init__(self):
            self.optimizer = optimizer

        def train_batch_size(self):
            return 4

    engine = Engine()
    zero3.attach(engine, build_transfer(DIRECT, simulated))
    optimizer.step()
    assert optimizer.values() == [after(0), after(1), after(2)]
    assert "disk full" in caplog.text


class ClampsAfterwards(SteppingStage3):
    """A user's subclass that changes the master after the update, as weight clipping does."""

    def _optimizer_step(self, sub_group_id):
        super()._optimizer_step(sub_group_id)
        self.fp32_partitioned_groups_flat[sub_group_id].data.clamp_(max=4)


@pytest.mark.parametrize("eager", [False, True], ids=["late", "early"])
def test_a_master_that_changes_after_its_update_is_copied_as_it_is_then(config, eager, monkeypatch):
    monkeypatch.setattr(stage3, "optimizer_classes", lambda: [Stage3, SteppingStage3])
    simulated = SimulatedAccelerator(eager=eager)
    optimizer = ClampsAfterwards(simulated)
    zero3.attach(optimizer, build_transfer(config, simulated))
    optimizer.step()
    assert optimizer.values() == [[min(value, 4.0) for value in after(each)] for each in range(2)]


def test_copies_that_run_early_are_right_too(config):
    simulated = SimulatedAccelerator(eager=True)
    optimizer = SteppingStage3(simulated, sub_groups=3)
    zero3.attach(optimizer, build_transfer(config, simulated))
    for steps in (1, 2):
        optimizer.step()
        assert optimizer.values() == [after(each, steps) for each in range(3)]
