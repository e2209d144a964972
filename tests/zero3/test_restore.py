"""Masters on NVMe after a checkpoint was loaded: on a stand-in, copies as late as may be."""

import inspect
import logging
import types

import pytest
import torch

from tests.zero3.swapping import SwappingStage3
from tests.zero3.test_deferred import DIRECT, STAGED, after
from transfer import (
    NotATensorError,
    PinnedStagedTransfer,
    StrategyUnavailableError,
    SwapCorruptedError,
    build_transfer,
    zero3,
)
from transfer.zero3.attachments import attachments
from transfer.zero3.stage3 import Stage3, SwapFile, buffers_of

SWAPPED, IN_MEMORY = (0, 2), 1


def loaded(sub_group_id):
    """What a checkpoint holds; no value is anything that a step makes, and bfloat16 has them all."""
    return [float(100 * (sub_group_id + 1) + 2 * value) for value in range(8)]


def make(simulated, folder, config=STAGED, in_memory=(IN_MEMORY,), **options):
    """An attached engine after one step, into whose swap files a checkpoint has been copied since."""
    optimizer = SwappingStage3(simulated, folder, in_memory=in_memory, **options)
    optimizer.fp16_partitioned_groups_flat = [simulated.device_empty(8, dtype=torch.float32) for _ in range(3)]
    zero3.attach(optimizer, build_transfer(config, simulated))
    optimizer.step()
    for each in SWAPPED:
        optimizer.info(each).write(torch.tensor(loaded(each)))
        optimizer.info(each).unswapped_gradients = {0: torch.ones(2)}
    optimizer.swapped_in.clear()
    optimizer.calls.clear()
    return optimizer


RESTORED = [loaded(0), after(IN_MEMORY), loaded(2)]


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("old_layout", [False, True], ids=["new", "0.16"])
@pytest.mark.parametrize("config", [DIRECT, STAGED, {**STAGED, "completion": "immediate"}], ids=str)
def test_masters_come_from_their_files_alone(simulated, tmp_path, config, pipelined, old_layout):
    optimizer = make(simulated, tmp_path, {**config, "fallback": True}, pipelined=pipelined, old_layout=old_layout)
    optimizer.reset_swap_buffers()
    assert optimizer.values() == RESTORED, "finished, and not before"
    assert optimizer.swapped_in == []
    assert sorted(optimizer.calls) == [("unflatten", each) for each in range(3)]


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
def test_what_is_left_is_what_deepspeed_leaves(simulated, tmp_path, pipelined):
    (tmp_path / "ours").mkdir()
    (tmp_path / "deepspeeds").mkdir()
    ours = make(simulated, tmp_path / "ours", pipelined=pipelined)
    deepspeeds = make(simulated, tmp_path / "deepspeeds", pipelined=pipelined)
    zero3.detach(deepspeeds)
    for optimizer in (ours, deepspeeds):
        optimizer.fp32_partitioned_groups_flat[0].grad = torch.ones_like(optimizer.fp32_partitioned_groups_flat[0])
        optimizer.reset_swap_buffers()
    assert (ours.swapped_in, deepspeeds.swapped_in) == ([], [0, 2])
    for each in SWAPPED:
        left = [
            (
                optimizer.info(each).unswapped_gradients,
                optimizer.fp32_partitioned_groups_flat[each].grad,
                optimizer.info(each).read().tolist(),
                dict(optimizer.optimizer_swapper.swap_buffer_manager.used_buffer_index),
            )
            for optimizer in (ours, deepspeeds)
        ]
        assert left[0] == left[1] == ({}, None, loaded(each), {})
    ours.step()
    assert ours.values() == [[value + 1 for value in values] for values in RESTORED]


def busy(optimizer):
    optimizer.optimizer_swapper.swap_buffer_manager.used_buffer_index[None] = 3


def without_buffer_indices(optimizer):
    manager = optimizer.optimizer_swapper.swap_buffer_manager
    allocate, free = manager.allocate, manager.free
    del manager.used_buffer_index

    def with_index():
        manager.used_buffer_index = {}
        return allocate()

    def then_without(buffer):
        free(buffer)
        del manager.used_buffer_index

    manager.allocate, manager.free = with_index, then_without


def without_path(optimizer):
    optimizer.info(2).tensors = []


def of_another_size(optimizer):
    optimizer.info(2).numel = lambda: 7


def parameters_offloaded(optimizer):
    optimizer.offload_param = True


def an_order_of_its_own(optimizer):
    optimizer.zenflow = True


@pytest.mark.parametrize(
    "special",
    [busy, without_buffer_indices, without_path, of_another_size, parameters_offloaded, an_order_of_its_own],
    ids=lambda special: special.__name__,
)
def test_deepspeeds_own_code_runs_for_all_where_one_thing_is_not_as_known(simulated, tmp_path, special):
    optimizer = make(simulated, tmp_path)
    special(optimizer)
    optimizer.reset_swap_buffers()
    assert optimizer.calls[0] == "reset"
    assert optimizer.swapped_in == [0, 2]
    if special is not parameters_offloaded:  # whose stand-in copies nothing
        assert optimizer.values() == RESTORED


def test_an_engine_without_swapped_sub_groups_is_deepspeeds_own(simulated, tmp_path):
    optimizer = SwappingStage3(simulated, tmp_path, in_memory=[0, 1, 2])
    zero3.attach(optimizer, build_transfer(STAGED, simulated))
    optimizer.reset_swap_buffers()
    assert optimizer.calls[0] == "reset"


def takes_no_files(transfer, error):
    submit = transfer.submit

    def refusing(destination, source):
        if not isinstance(source, torch.Tensor):
            raise error
        return submit(destination, source)

    transfer.submit = refusing


@pytest.mark.parametrize("error", [NotATensorError("a file"), StrategyUnavailableError("no ring")], ids=repr)
def test_a_transfer_that_takes_no_files_leaves_it_to_deepspeed(simulated, tmp_path, error, caplog):
    optimizer = make(simulated, tmp_path)
    takes_no_files(attachments.get(optimizer).transfer, error)
    with caplog.at_level(logging.WARNING, logger="transfer"):
        optimizer.reset_swap_buffers()
    assert optimizer.values() == RESTORED
    assert optimizer.swapped_in == [0, 2]
    assert str(error) in caplog.text


def test_a_file_that_is_too_short_is_an_error_that_names_it(simulated, tmp_path):
    """DeepSpeed's reader ends the process then."""
    optimizer = make(simulated, tmp_path)
    optimizer.info(2).path.write_bytes(bytes(8 * 4 - 1))
    with pytest.raises(SwapCorruptedError, match=r"2\.tensor\.swp"):
        optimizer.reset_swap_buffers()
    assert optimizer.values()[0] == after(0), "nothing has been copied yet"


def test_a_caller_s_own_strategy_that_reads_no_files_leaves_it_to_deepspeed(simulated, tmp_path, caplog):
    optimizer = make(simulated, tmp_path)
    zero3.attach(optimizer, PinnedStagedTransfer(accelerator=simulated, chunk_elements=3))
    optimizer.reset_swap_buffers()
    assert optimizer.values() == RESTORED
    assert optimizer.swapped_in == [0, 2]
    assert "DeepSpeed's own code" in caplog.text


def test_without_fallback_a_refusal_is_raised(simulated, tmp_path):
    optimizer = make(simulated, tmp_path, {**STAGED, "fallback": False})
    takes_no_files(attachments.get(optimizer).transfer, StrategyUnavailableError("no ring"))
    with pytest.raises(StrategyUnavailableError):
        optimizer.reset_swap_buffers()


@pytest.mark.parametrize("error", [OSError("bad block"), KeyboardInterrupt()], ids=repr)
def test_an_error_on_the_way_leaves_nothing_in_flight(simulated, tmp_path, error):
    # Without a master in memory, whose copy is waited for at once, and with it what was queued before.
    optimizer = make(simulated, tmp_path, in_memory=[])
    transfer, calls = attachments.get(optimizer).transfer, []
    submit = transfer.submit

    def failing_at_the_third_file(destination, source):
        calls.append(source)
        if len(calls) == 3:
            raise error
        return submit(destination, source)

    transfer.submit = failing_at_the_third_file
    with pytest.raises(type(error)) as raised:
        optimizer.reset_swap_buffers()
    assert raised.value is error
    assert not simulated._queue.pending_tensors()
    assert optimizer.values() == [loaded(0), after(1), after(2)]
    transfer.submit = submit
    optimizer.reset_swap_buffers()
    assert optimizer.values() == RESTORED


def arguments_of(function, **offered):
    """Those of ``offered`` that this version of DeepSpeed takes."""
    return {name: value for name, value in offered.items() if name in inspect.signature(function).parameters}


def test_deepspeeds_swap_info_has_the_masters_path_first(tmp_path):
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerStateSwapInfo

    tensors = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
    for tensor, identifier in zip(tensors, ("3_7", "exp_avg-3_7"), strict=True):
        tensor.ds_id = identifier
    offered = {"parameter": tensors[0], "numel": 5, "base_folder": str(tmp_path), "aio_handle": None}
    info = OptimizerStateSwapInfo(**arguments_of(OptimizerStateSwapInfo, **offered))
    info.add_state_tensors(tensors[1:])
    swapper = types.SimpleNamespace(swap_params_info={"3_7": info})
    view = Stage3(types.SimpleNamespace(optimizer_swapper=swapper, fp32_partitioned_groups_flat=tensors))
    assert view.swap_file(0) == SwapFile(f"{tmp_path}/3_7.tensor.swp", torch.float32, 5)
    info.unswapped_gradients = {0: torch.ones(1)}
    view.forget_gradients(0)
    assert info.unswapped_gradients == {}


def test_deepspeeds_buffer_manager_says_which_buffers_are_in_use(monkeypatch):
    from deepspeed.runtime.swap_tensor import utils

    class Handle:
        def new_cpu_locked_tensor(self, numel, example):
            return torch.empty(numel, dtype=example.dtype)

    monkeypatch.setattr(utils.dist, "get_rank", lambda: 1)
    offered = {"num_elems": 4, "count": 3, "dtype": torch.float32, "aio_handle": Handle()}
    manager = utils.SwapBufferManager(**arguments_of(utils.SwapBufferManager, **offered))
    assert len(buffers_of(manager)) == 3
    view = Stage3(types.SimpleNamespace(optimizer_swapper=types.SimpleNamespace(swap_buffer_manager=manager)))
    assert not view.uses_buffers
    buffers = manager.allocate(num_elems=3, count=2, dtype=torch.float32)
    assert view.uses_buffers
    manager.free(buffers)
    assert not view.uses_buffers
