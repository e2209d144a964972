"""What a step asks once, and what changes in the middle of it: on a stand-in, copies as late as may be."""

import functools

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.zero3.stand_ins import SteppingStage3, TiledStage3
from tests.zero3.test_deferred import BEFORE, DIRECT, STAGED, after
from transfer import build_transfer, zero3
from transfer.zero3 import plan, tiles


@pytest.fixture
def optimizer(simulated):
    return SteppingStage3(simulated, sub_groups=3)


def count_questions(transfer, monkeypatch):
    """The destinations for which the transfer is asked whether a copy would go from host to device."""
    ask, asked = transfer.is_host_to_device, []

    def asking(destination, source):
        asked.append(destination.data_ptr())
        return ask(destination, source)

    monkeypatch.setattr(transfer, "is_host_to_device", asking)
    return asked


def test_a_step_asks_once_for_each_sub_group(simulated, optimizer, monkeypatch):
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)
    asked = count_questions(transfer, monkeypatch)
    for steps in (1, 2):
        optimizer.step()
        assert len(asked) == 3 * steps, "and anew in the next step"
        assert len(set(asked)) == 3


def test_a_copy_back_outside_of_a_step_asks_for_itself(simulated, optimizer, monkeypatch):
    transfer = build_transfer(STAGED, simulated)
    zero3.attach(optimizer, transfer)
    asked = count_questions(transfer, monkeypatch)
    for _ in range(2):
        optimizer._reassign_or_swap_out_partitioned_parameters(1)
    assert len(asked) == 2


def test_an_update_waits_for_the_copy_that_still_reads_its_master(simulated, optimizer):
    """DeepSpeed's copy-back is over when it returns: a later update of the master does not reach the partition."""
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    optimizer.call_at = (2, lambda: optimizer._optimizer_step(0))
    optimizer.step()
    assert optimizer.fp32_partitioned_groups_flat[0].tolist() == after(0, 2)
    assert optimizer.values() == [after(0), after(1), after(2)]


def test_a_master_that_is_rebound_in_its_update_is_copied_from_where_it_is(simulated, optimizer):
    transfer = build_transfer({**DIRECT, "fallback": True}, simulated)
    zero3.attach(optimizer, transfer)

    def rebind():
        optimizer.fp32_partitioned_groups_flat[1] = torch.full((8,), 40.0)

    optimizer.call_at = (1, rebind)
    optimizer.step()
    assert optimizer.values() == [after(0), [40.0] * 8, after(2)]
    assert transfer.stats()["pinned_direct"].copies == 3, "the new one was prepared too"


def test_a_master_that_moves_to_the_device_in_its_update_is_deepspeeds(simulated, optimizer):
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))

    def move():
        optimizer.fp32_partitioned_groups_flat[1] = simulated.adopt(optimizer.fp32_partitioned_groups_flat[1].clone())

    optimizer.call_at = (1, move)
    optimizer.step()
    assert optimizer.calls == [("unflatten", 0), ("deepspeed", 1), ("unflatten", 2), "post"]


def test_closing_the_transfer_in_the_middle_of_a_step_loses_nothing(simulated, optimizer):
    transfer = build_transfer({**DIRECT, "fallback": True}, simulated)
    zero3.attach(optimizer, transfer)
    optimizer.call_at = (1, transfer.close)
    for steps in (1, 2):
        optimizer.step()
        assert optimizer.values() == [after(each, steps) for each in range(3)]


def test_a_method_that_is_patched_in_the_middle_of_a_step_finds_every_copy_finished(simulated, optimizer, monkeypatch):
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    release, seen = SteppingStage3._release_sub_group, []

    def looking(self, sub_group_id, timer_names):
        seen.append(self.values()[: sub_group_id + 1])
        release(self, sub_group_id, timer_names)

    with monkeypatch.context() as patched:
        optimizer.call_at = (1, lambda: patched.setattr(SteppingStage3, "_release_sub_group", looking))
        optimizer.step()
    assert seen == [[after(0), after(1)], [after(0), after(1), after(2)]]


def test_a_hook_that_is_registered_in_the_middle_of_a_step_finds_every_copy_finished(simulated, optimizer):
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    handles = []
    optimizer.call_at = (1, lambda: handles.append(register_optimizer_step_post_hook(lambda *_: None)))
    try:
        optimizer.step()
        assert optimizer.seen_at_update[1][0] == BEFORE
        assert optimizer.seen_at_update[2][:2] == [after(0), after(1)]
    finally:
        handles[0].remove()


def test_a_step_whose_end_has_another_name_waits_at_once(simulated, optimizer, monkeypatch):
    """As a later DeepSpeed may have: where the end cannot be seen, nothing is left to it."""
    monkeypatch.setattr(SteppingStage3, "_finish_step", SteppingStage3._post_step, raising=False)
    monkeypatch.setattr(SteppingStage3, "step", renamed_end)
    monkeypatch.delattr(SteppingStage3, "_post_step")
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    optimizer.step()
    assert optimizer.seen_at_gather == [after(0), after(1), after(2)]
    zero3.detach(optimizer)


def renamed_end(self, closure=None):
    for sub_group_id in range(3):
        self._optimizer_step(sub_group_id)
        self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        self._release_sub_group(sub_group_id, set())
    self._finish_step(set())


@pytest.fixture
def tiled(simulated, monkeypatch):
    """A stand-in whose sub-groups are updated in tiles of 3, 3 and 2 elements."""
    monkeypatch.setattr(plan, "updates_in_parts", lambda optimizer: True)
    monkeypatch.setattr(tiles, "ALIGNMENT_ELEMENTS", 3)
    monkeypatch.setattr(tiles, "default_tile_elements", lambda: 5)
    return TiledStage3(simulated)


RIGHT = [after(each) for each in range(3)]


@pytest.mark.parametrize("config", [DIRECT, STAGED], ids=["direct", "staged"])
def test_every_sub_group_goes_in_tiles(simulated, tiled, config):
    transfer = build_transfer(config, simulated)
    zero3.attach(tiled, transfer)
    tiled.step()
    assert tiled.optimizer.ds_opt_adam.updated == [3, 3, 2] * 3
    assert tiled.seen_at_gather == RIGHT
    copies = sum(counts.copies for counts in transfer.stats().values())
    assert copies == 6, "of 6 and 2 elements, and not once more as a whole"


@pytest.mark.parametrize("tile", [7, 8, 9])
def test_code_that_comes_in_between_tiles_finds_the_copy_back_finished(simulated, tiled, tile, monkeypatch):
    zero3.attach(tiled, build_transfer(DIRECT, simulated))
    release, seen = TiledStage3._release_sub_group, []

    @functools.wraps(release)
    def looking(self, sub_group_id, timer_names):
        seen.append(self.values())
        release(self, sub_group_id, timer_names)

    with monkeypatch.context() as patched:
        tiled.optimizer.ds_opt_adam.at[tile] = lambda: patched.setattr(SteppingStage3, "_release_sub_group", looking)
        tiled.step()
    assert seen == [RIGHT]
    assert tiled.seen_at_gather == RIGHT


@pytest.mark.parametrize("tile", [7, 8, 9])
def test_a_transfer_that_is_attached_between_tiles_copies_the_whole_master(simulated, tiled, tile):
    first, second = build_transfer(DIRECT, simulated), build_transfer(STAGED, simulated)
    zero3.attach(tiled, first)
    tiled.optimizer.ds_opt_adam.at[tile] = lambda: zero3.attach(tiled, second)
    tiled.step()
    assert tiled.seen_at_gather == RIGHT
    assert second.stats()["pinned_staged"].bytes == 8 * 2
    tiled.step()
    assert tiled.values() == [after(each, 2) for each in range(3)]


@pytest.mark.parametrize("tile", [7, 8, 9])
def test_detaching_between_tiles_leaves_the_copy_back_to_deepspeed(simulated, tiled, tile):
    zero3.attach(tiled, build_transfer(DIRECT, simulated))
    tiled.optimizer.ds_opt_adam.at[tile] = lambda: zero3.detach(tiled)
    tiled.step()
    assert tiled.calls[-2:] == [("deepspeed", 2), "post"]
    assert tiled.fp32_partitioned_groups_flat[2].tolist() == after(2), "updated once, whole"
    assert simulated.pinned_bytes == 0


@pytest.mark.parametrize("tile", [7, 8, 9])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no stream")], ids=repr)
def test_an_error_between_tiles_leaves_the_master_updated_once_and_nothing_in_flight(simulated, tiled, tile, error):
    zero3.attach(tiled, build_transfer(DIRECT, simulated))

    def fail():
        raise error

    tiled.optimizer.ds_opt_adam.at[tile] = fail
    with pytest.raises(type(error)) as raised:
        tiled.step()
    assert raised.value is error
    assert tiled.fp32_partitioned_groups_flat[2].tolist() == after(2)
    assert not simulated._queue.pending_tensors()
    tiled.step()
    assert tiled.values() == [after(each, 2) for each in range(3)]


def test_what_was_asked_at_the_start_of_a_step_is_not_asked_again(simulated, tiled, monkeypatch):
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(tiled, transfer)
    asked = count_questions(transfer, monkeypatch)
    tiled.step()
    assert len(asked) == len(set(asked)) == 3


@pytest.mark.parametrize("updates", [3, 4])
def test_a_master_that_moves_after_it_was_asked_for_is_deepspeeds(simulated, tiled, updates):
    zero3.attach(tiled, build_transfer(DIRECT, simulated))

    def move():
        tiled.fp32_partitioned_groups_flat[1] = simulated.adopt(tiled.fp32_partitioned_groups_flat[1].clone())

    tiled.optimizer.ds_opt_adam.at[updates] = move
    tiled.step()
    assert tiled.calls == [("unflatten", 0), ("deepspeed", 1), ("unflatten", 2), "post"]


def test_partitions_on_the_host_are_copied_tile_by_tile_too(simulated, tiled):
    """As with `offload_param`: the values are in the caches then."""
    tiled.offload_param = True
    tiled.fp16_partitioned_groups_flat = [torch.full((8,), -1.0, dtype=torch.bfloat16) for _ in range(3)]
    transfer = build_transfer(DIRECT | {"fallback": True}, simulated)
    zero3.attach(tiled, transfer)
    tiled.step()
    assert tiled.calls == [("unflatten", 0), ("unflatten", 1), ("unflatten", 2), "post"]
    assert tiled.seen_at_update == [[BEFORE] * 3, [after(0), BEFORE, BEFORE], [after(0), after(1), BEFORE]]
    assert tiled.values() == RIGHT
    assert simulated.pinned_bytes == 0, "the device reads none of it"


def test_a_master_that_is_rebound_between_tiles_is_copied_whole(simulated, tiled):
    zero3.attach(tiled, build_transfer({**DIRECT, "fallback": True}, simulated))

    def rebind():
        tiled.fp32_partitioned_groups_flat[1] = torch.full((8,), 40.0)

    tiled.optimizer.ds_opt_adam.at[4] = rebind
    tiled.step()
    assert tiled.values() == [after(0), [40.0] * 8, after(2)]
