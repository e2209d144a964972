"""The modes that hand copies of DeepSpeed's functions on: which calls, and what comes of them."""

import logging
import types

import pytest
import torch

from tests.zero3.stand_ins import Stage3
from transfer import build_transfer, zero3
from transfer.zero3.inside.watching import WatchingCopies, WatchingMoves

STAGED = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}


@pytest.fixture
def transfer(simulated):
    with build_transfer(STAGED, simulated) as made:
        yield made


def copies(transfer):
    return sum(counts.copies for counts in transfer.stats().values())


class TestCopies:
    @pytest.fixture
    def pair(self, simulated):
        return simulated.device_empty(8, dtype=torch.bfloat16), torch.arange(8.0)

    def watch(self, pair, make):
        """The keys that were handed on while ``make`` ran, and those that were missing then."""
        seen = []
        with WatchingCopies({4: pair}, lambda key, *_: seen.append(key)) as watching:
            make()
        return seen, watching.missing

    def test_the_copy_of_a_pair_is_handed_on_also_through_other_views(self, pair):
        destination, source = (torch.nn.Parameter(each) for each in pair)
        assert self.watch(pair, lambda: destination.data.copy_(source.data)) == ([4], set())

    @pytest.mark.parametrize(
        "make",
        [
            lambda destination, source: destination.narrow(0, 0, 4).copy_(source.narrow(0, 0, 4)),
            lambda destination, source: destination.copy_(source.clone()),
            lambda destination, source: destination.clone().copy_(source),
            lambda destination, source: destination.copy_(source, non_blocking=True),
            lambda destination, source: destination.add_(source),
            lambda destination, source: source.copy_(destination),
        ],
    )
    def test_every_other_call_is_torchs(self, pair, make):
        assert self.watch(pair, lambda: make(*pair)) == ([], {4})

    def test_an_empty_partition_is_not_missed(self):
        empty = (torch.empty(0, dtype=torch.bfloat16), torch.empty(0))
        assert self.watch(empty, lambda: None) == ([], set())


class TestMoves:
    @pytest.mark.parametrize(
        "move",
        [
            lambda source: source.to("cpu"),
            lambda source: source.to("cpu", non_blocking=False),
            lambda source: source.to(device=torch.device("cpu"), dtype=torch.bfloat16),
        ],
    )
    def test_pageable_memory_goes_through_the_transfer(self, simulated, transfer, move):
        source = torch.linspace(-1, 1, 10).view(2, 5)
        with WatchingMoves(transfer):
            moved = move(source)
        assert simulated.on_device(moved)
        assert torch.equal(moved, move(source))
        assert moved.dtype == move(source).dtype
        assert copies(transfer) == 1

    @pytest.mark.parametrize(
        "move",
        [
            lambda source: source.to("cpu", non_blocking=True),
            lambda source: source.to(torch.bfloat16),
            lambda source: source.to("meta"),
            lambda source: source.to("cpu", copy=True),
            lambda source: source.t().to("cpu"),
            lambda source: source[:0].to("cpu"),
            lambda source: source.cpu(),
        ],
    )
    def test_every_other_call_is_torchs(self, transfer, move):
        with WatchingMoves(transfer):
            move(torch.ones(2, 5))
        assert copies(transfer) == 0

    def test_pinned_memory_is_left_alone(self, simulated, transfer):
        source = simulated.pin_empty(8, dtype=torch.float32)
        with WatchingMoves(transfer):
            assert source.to("cpu") is source
        assert copies(transfer) == 0


class Restoring(Stage3):
    """Restores as DeepSpeed does; ``moved`` in another way."""

    moved = False

    def _rigid_load_state_dict(self, state_dict):
        masters = self.fp32_partitioned_groups_flat
        for number, (partition, master) in enumerate(zip(self.fp16_partitioned_groups_flat, masters, strict=True)):
            master.data.copy_(torch.full((8,), 2.0 + number))
            if self.moved:
                partition.data = partition.data.new_tensor(master.data.tolist())
            else:
                partition.data.copy_(master.data)


@pytest.mark.parametrize("moved", [False, True])
def test_a_restore_that_is_made_in_another_way_is_noticed(simulated, transfer, caplog, moved):
    optimizer = Restoring(simulated)
    optimizer.moved = moved
    zero3.attach(optimizer, transfer)
    with caplog.at_level(logging.WARNING, "transfer"):
        optimizer._rigid_load_state_dict({})
    assert [each.tolist() for each in optimizer.fp16_partitioned_groups_flat] == [[2.0] * 8, [3.0] * 8]
    assert copies(transfer) == (0 if moved else 2)
    noticed = "copies 2 of 2 master partitions after a checkpoint was loaded in another way"
    assert (noticed in caplog.text) == moved
    zero3.detach(optimizer)
    optimizer._rigid_load_state_dict({})
    assert copies(transfer) == (0 if moved else 2), "detached"


class ZenFlow(Stage3):
    """What DeepSpeed's function of ZenFlow uses; its other process has left new masters."""

    zenflow = zenflow_overlap_step = process_optimizer_established = True
    first_update_round_after_warmup = False
    micro_step, full_warm_up_rounds = 1, 0
    n_caching_allocator_flushes = 0

    def __init__(self, simulated):
        super().__init__(simulated, 3)
        self.fp16_groups = [[], [], []]
        self.zf_ctrl = torch.zeros(1)
        self.zf_op = types.SimpleNamespace(zenflow_adam_wait=lambda *_: True)
        self.parent_conn = types.SimpleNamespace(recv=lambda: {"type": "done"})  # before 0.19
        for number, master in enumerate(self.fp32_partitioned_groups_flat):
            vars(master)["stale_param"] = torch.full((8,), 5.0 + number).share_memory_()
        self.seen_at_gather = None

    def _post_step(self, timer_names):
        self.seen_at_gather = [partition.tolist() for partition in self.fp16_partitioned_groups_flat]


@pytest.fixture
def zenflow():
    return pytest.importorskip("deepspeed.runtime.zenflow.engine_stage3", reason="This DeepSpeed has no ZenFlow.")


@pytest.mark.parametrize("strategy", ["pinned_staged", "pinned_direct"])
def test_zenflows_copy_back_is_served(simulated, zenflow, strategy):
    optimizer = ZenFlow(simulated)
    with build_transfer({"strategy": strategy, "fallback": False}, simulated) as transfer:
        zero3.attach(optimizer, transfer)
        zenflow.wait_last_update_and_copy(optimizer, set())
        assert optimizer.seen_at_gather == [[5.0] * 8, [6.0] * 8, [7.0] * 8], "finished before parameters are gathered"
        assert transfer.stats()[strategy].copies == 3
        assert transfer.page_locked_bytes == (3 * 8 * 4 if strategy == "pinned_direct" else 0)
        zero3.detach(optimizer)
        assert transfer.page_locked_bytes == 0
        alone = ZenFlow(simulated)
        zenflow.wait_last_update_and_copy(alone, set())
        assert alone.seen_at_gather == optimizer.seen_at_gather
        assert transfer.stats()[strategy].copies == 3


def test_a_round_of_zenflow_without_an_update_is_no_move(simulated, zenflow, transfer, caplog):
    optimizer = ZenFlow(simulated)
    zero3.attach(optimizer, transfer)
    optimizer.first_update_round_after_warmup = True
    zenflow.wait_last_update_and_copy(optimizer, set())
    assert optimizer.seen_at_gather is None
    assert copies(transfer) == 0
    assert "another way" not in caplog.text


def test_a_copy_back_of_zenflow_in_another_way_is_noticed(simulated, zenflow, transfer, caplog):
    optimizer = ZenFlow(simulated)
    zero3.attach(optimizer, transfer)
    optimizer.fp16_groups = [[], []]  # the third is not copied
    zenflow.wait_last_update_and_copy(optimizer, set())
    assert "copies 1 of 3 master partitions after an update by ZenFlow in another way" in caplog.text
