"""Masters in memory of our own: what is moved, what is not, and that it outlives its tensor while it is page-locked."""

import copy
import gc
import io
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.transfer.direct_tools import direct
from transfer.memory.own_memory import LEAST_BYTES, move

NUMEL = LEAST_BYTES // 4


def addresses(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_a_moved_parameter_is_the_same_object_with_the_same_values():
    parameter = torch.nn.Parameter(torch.arange(float(NUMEL)))
    parameter.grad = torch.ones(NUMEL)
    before, state = parameter.data_ptr(), {parameter: "state"}
    assert move(parameter)
    assert parameter.data_ptr() != before
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert state[parameter] == "state"
    assert torch.equal(parameter.detach(), torch.arange(float(NUMEL)))
    torch.optim.SGD([parameter], lr=1.0).step()
    assert torch.equal(parameter.detach(), torch.arange(float(NUMEL)) - 1)
    assert torch.equal(copy.deepcopy(parameter), parameter)
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    assert torch.equal(torch.load(file), parameter)
    assert not move(parameter), "once"


def with_a_view():
    tensor = torch.zeros(NUMEL)
    return tensor, tensor[3:5]


def with_an_alias():
    tensor = torch.zeros(NUMEL)
    return tensor, tensor.data


def with_an_array():
    tensor = torch.zeros(NUMEL)
    return tensor, tensor.numpy()


def of_numpy():
    array = np.zeros(NUMEL, dtype=np.float32)
    return torch.from_numpy(array), array


def a_part():
    whole = torch.zeros(2 * NUMEL)
    return whole[:NUMEL], None


@pytest.mark.parametrize(
    "make",
    [
        with_a_view,
        with_an_alias,
        with_an_array,
        of_numpy,
        a_part,
        lambda: (torch.zeros(NUMEL).share_memory_(), None),
        lambda: (torch.zeros(NUMEL - 1), None),
        lambda: (torch.zeros(NUMEL, 2).t(), None),
        lambda: (torch.zeros(NUMEL, device="meta"), None),
        lambda: (torch.empty(0), None),
    ],
)
def test_what_others_may_see_stays_where_it_is(make):
    """A write through the other name would be lost."""
    tensor, other = make()
    before = tensor.data_ptr() if tensor.device.type == "cpu" else 0
    assert not move(tensor)
    assert tensor.device.type == "meta" or tensor.data_ptr() == before
    del other


def test_memory_stays_mapped_while_it_is_page_locked(simulated):
    """Sending a tensor through a queue of torch.multiprocessing moves it as share_memory_ does."""
    transfer = direct(simulated)
    numel = 16 * 2**20
    source = torch.zeros(numel)
    assert move(source)
    transfer.prepare(source)
    begin, end = addresses(source)
    source.share_memory_()
    assert source.data_ptr() != begin
    others = [torch.zeros(numel // 2) for _ in range(6)]
    assert not any(begin < addresses(other)[1] and addresses(other)[0] < end for other in others)
    assert not any(map(simulated.is_pinned, others))
    transfer.prepare(source)
    assert simulated._registered.size_at(begin) is None
    assert transfer.page_locked_bytes == simulated.pinned_bytes == source.nbytes
    transfer.close()


@pytest.mark.slow
def test_it_is_freed_with_its_tensor():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    for _ in range(20):
        tensor = torch.zeros(16 * 2**20)
        assert move(tensor)
        del tensor
    gc.collect()
    assert resident() - before < 5 * 64 * 2**20


def test_memory_that_the_system_refuses_costs_nothing_else(simulated, monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    tensor = torch.zeros(NUMEL)
    before = tensor.data_ptr()
    assert not move(tensor)
    assert tensor.data_ptr() == before
