"""Parameters on NVMe whose partitions are on the device all the same: on a stand-in, copies as late as may be."""

import pytest
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from tests.zero3.stand_ins import Spy, Stage3
from tests.zero3.test_deferred import DIRECT, STAGED
from transfer import build_transfer
from transfer.zero3 import engines as zero3


class ParamSwapper:
    """Writes what it is given to ``disk``."""

    def __init__(self):
        self.disk = {}

    def swap_out_partitioned_params(self, dst_fp16_params, src_fp32_params):
        for parameter, source in zip(dst_fp16_params, src_fp32_params, strict=True):
            self.disk[parameter.name] = source.tolist()


class Parameter:
    def __init__(self, name, swapper):
        self.name, self.nvme_swapper = name, swapper


class ParamSwappingStage3(Stage3):
    """One sub-group without a flat buffer: of four parameters, with 2, 3, 1 and 2 elements."""

    offload_param = True

    def __init__(self, partitions):
        self.calls = []
        self.swapper = ParamSwapper()
        self.fp16_partitioned_groups_flat = [None]
        self.fp32_partitioned_groups_flat = [torch.nn.Parameter(torch.arange(8.0))]
        self.fp16_groups = [[Parameter(name, self.swapper) for name in "abcd"]]
        self.fp16_partitioned_groups = [partitions]

    def values(self):
        return [partition.tolist() for partition in self.fp16_partitioned_groups[0]]

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
        self._partitioned_params_swap_out(sub_group_id)

    def _partitioned_params_swap_out(self, sub_group_id):
        self.calls.append("deepspeed")


def partition(tensor, numel, status=PartitionedParamStatus.AVAILABLE):
    tensor.ds_numel, tensor.status = numel, status
    return tensor


def absent(numel):
    return partition(torch.tensor(1.0), numel, PartitionedParamStatus.NOT_AVAILABLE)


def on_device(simulated, numel):
    return partition(simulated.device_empty(numel, dtype=torch.bfloat16).fill_(-1), numel)


def on_host(numel):
    return partition(torch.full((numel,), -1, dtype=torch.bfloat16), numel)


@pytest.mark.parametrize("config", [DIRECT, STAGED], ids=["direct", "staged"])
def test_what_is_on_the_device_is_finished_and_the_rest_is_written(simulated, config):
    partitions = [on_device(simulated, 2), absent(3), on_host(1), on_device(simulated, 2)]
    optimizer = ParamSwappingStage3(partitions)
    transfer = build_transfer(config, simulated)
    zero3.attach(optimizer, transfer)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.values() == [[0, 1], 1, [5], [6, 7]]
    assert optimizer.swapper.disk == {"b": [2, 3, 4]}
    assert sum(counts.bytes for counts in transfer.stats().values()) == (2 + 2) * 2
    assert optimizer.calls == []


def test_masters_are_page_locked_only_where_pieces_of_them_ask_for_it(simulated):
    large = torch.zeros(2**20)  # of which single parameters take a few elements
    for config, expected in ((DIRECT, 2**22), ({}, 0)):
        optimizer = ParamSwappingStage3([on_device(simulated, 2), on_device(simulated, 3), absent(1), absent(2)])
        optimizer.fp32_partitioned_groups_flat = [large]
        transfer = build_transfer(config, simulated)
        zero3.attach(optimizer, transfer)
        assert transfer.page_locked_bytes == 0
        optimizer._partitioned_params_swap_out(0)
        assert transfer.page_locked_bytes == expected
        transfer.close()


def test_nothing_is_written_where_everything_is_on_the_device(simulated):
    optimizer = ParamSwappingStage3([on_device(simulated, numel) for numel in (2, 3, 1, 2)])
    zero3.attach(optimizer, build_transfer(STAGED, simulated))
    optimizer._partitioned_params_swap_out(0)
    assert optimizer.values() == [[0, 1], [2, 3, 4], [5], [6, 7]]
    assert optimizer.swapper.disk == {}


def test_deepspeeds_own_code_runs_where_nothing_crosses(simulated):
    optimizer = ParamSwappingStage3([on_host(2), absent(3), absent(1), on_host(2)])
    spy = Spy(simulated)
    zero3.attach(optimizer, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == ["deepspeed"]
    assert spy.log == []
    zero3.detach(optimizer)
    optimizer.fp16_partitioned_groups = [[on_device(simulated, 8)]]
    optimizer._partitioned_params_swap_out(0)
    assert optimizer.calls == ["deepspeed"] * 2, "detached"


def test_an_engine_that_is_being_made_is_not_attached_by_its_first_swap_out(simulated, stand_ins, monkeypatch):
    """DeepSpeed's constructor calls this method, before anybody has had a chance to say how to attach."""
    from transfer.zero3 import patching as zero3_hooks

    monkeypatch.setattr(zero3_hooks, "zero3_classes", lambda: [Stage3, ParamSwappingStage3])
    zero3.install(STAGED)
    optimizer = ParamSwappingStage3([on_device(simulated, numel) for numel in (2, 3, 1, 2)])
    optimizer._partitioned_params_swap_out(0)
    assert optimizer.calls == ["deepspeed"]
    assert optimizer not in zero3._attachments
