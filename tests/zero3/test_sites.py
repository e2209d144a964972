"""The list of copies from host to device holds against DeepSpeed's source: each is there, and there are no others."""

import ast
import functools
from pathlib import Path

import deepspeed
import pytest
from packaging.version import Version

from transfer.zero3 import stage3

HERE = Version(Version(deepspeed.__version__).base_version)
PACKAGE = Path(deepspeed.__file__).parent
#: What torch copies from one memory to another with.
COPIES = {"copy_", "to", "cuda"}
#: ZeRO-3 and its neighbours.
NEIGHBOURS = (
    *(
        f"deepspeed.runtime.zero.{name}"
        for name in (
            "stage3",
            "partition_parameters",
            "parameter_offload",
            "partitioned_param_coordinator",
            "offload_states",
            "utils",
        )
    ),
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.superoffload.superoffload_utils",
    "deepspeed.runtime.zenflow.engine_stage3",
    "deepspeed.runtime.zenflow.zenflow_utils",
    "deepspeed.ops.adam.zenflow_torch_adam",
    *(
        f"deepspeed.runtime.swap_tensor.{name}"
        for name in (
            "optimizer_utils",
            "partitioned_optimizer_swapper",
            "pipelined_optimizer_swapper",
            "partitioned_param_swapper",
            "utils",
        )
    ),
    "deepspeed.compile.passes.offload_adam_states",
)

ZERO3 = "DeepSpeedZeroOptimizer_Stage3."
CONVERT = "Init._convert_to_deepspeed_param."
#: Calls that copy elsewhere, in 0.19.8: by module and function.
TO_THE_HOST = {
    "stage3": {
        "_create_fp32_partitions": 2,
        "_offload_grad_partition_at_boundary": 1,
        "_restore_from_bit16_weights": 1,
        "_muon_update_sub_group": 3,
        "_apply_muon_updates_cpu_offload": 2,
        "partition_grads": 2,
        "set_fp32_grad_for_param": 1,
        "set_full_hp_param": 1,
        "set_local_grad_for_param": 1,
        "set_local_hp_param": 1,
        "update_fp32_grad_for_param_vectorized": 1,
        "offload_states": 7,
    },
    "partition_parameters": {"Init._partition_param": 2},
    "offload_states": {"offload_optimizer_states": 2, "offload_adam_states.move_key": 1},
    "utils": {"defragment": 1},
    "superoffload_stage3": {"SuperOffloadOptimizer_Stage3.partition_grads": 3},
    "engine_stage3": {"partition_grads": 3, "sync_fp32_param_from_gpu": 1},
    "zenflow_torch_adam": {
        "ZenFlowSelectiveAdamW.copy_mv_to_cpu": 2,
        "ZenFlowSelectiveAdamW_stage3.copy_mv_to_cpu": 2,
        "ZenFlowSelectiveAdamW_stage3._selective_step_one_param": 4,
    },
    "offload_adam_states": {"move_key": 1, "move_hp_param": 1},
}
WITHIN_THE_HOST = {
    "stage3": {
        "_swap_in_sub_group_to_flat_buffer": 2,
        "_restore_base_optimizer_state": 1,
        "_restore_from_fp32_weights": 1,
        "_rigid_load_state_dict": 1,
        "load_hp_checkpoint_state_from_checkpoint_dir_stage3": 2,
        "load_module_checkpoint_state_from_checkpoint_dir_stage3": 3,
    },
    "superoffload_stage3": {"SuperOffloadOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters_async": 1},
    "superoffload_utils": {"superoffload_optimizer_worker": 1},
    "engine_stage3": {"initialize_optimizer_states": 2},
    "optimizer_utils": {
        "OptimizerStateSwapInfo.read_unswapped_gradients": 1,
        "OptimizerStateSwapInfo.write_unswapped_gradients": 1,
        "OptimizerSwapper._swap_in_fp16_params": 1,
        "OptimizerSwapper._swap_out_unpinned_tensors": 1,
    },
    "partitioned_param_swapper": {"AsyncPartitionedParameterSwapper.swap_into_buffer": 1},
    "pipelined_optimizer_swapper": {"PipelinedOptimizerSwapper._swap_out_optimizer_state": 1},
    "utils": {"SwapBuffer.insert_tensor": 1},
}
#: Also casts, and copies that have no direction of their own: of a partition to where it lies.
WITHIN_THE_DEVICE = {
    "stage3": {
        "__add_grad_to_ipg_bucket": 2,
        "__avg_scatter_contiguous_grads": 2,
        "__avg_scatter_grads": 2,
        "__init__": 1,
        "_apply_muon_to_accumulated_grads": 1,
        "_apply_muon_updates_cpu_offload": 5,
        "_muon_update_sub_group": 3,
        "_constant_buffered_norm2": 2,
        "_move_to_flat_buffer": 1,
        "_offload_grad_partition_at_boundary": 2,
        "_partitioned_buffers_all_gather": 4,
        "_prepare_fp32_grad_for_sub_group": 1,
        "allreduce_and_copy": 1,
        "allreduce_bucket": 2,
        "get_grad_norm_direct": 2,
        "has_overflow": 1,
        "load_module_checkpoint_state_from_checkpoint_dir_stage3": 2,
        "partition_grads": 2,
    },
    "partition_parameters": {
        "AllGatherCoalescedHandle.wait": 2,
        "AllGatherHandle.wait": 3,
        "CUDAQuantizer.dequantize": 1,
        f"{CONVERT}_all_gather_dtype": 2,
        f"{CONVERT}_all_gather_sequential": 3,
        "Init._partition_gradient": 3,
        "Init._partition_param_sec": 1,
        "Init._reduce_scatter_gradient": 1,
        "Init._reduce_scatter_gradients": 1,
        "get_new_tensor_fn_for_dtype.new_tensor": 1,
        "zero_wrapper_for_fp_tensor_constructor.wrapped_fn": 1,
    },
    "superoffload_stage3": {"SuperOffloadOptimizer_Stage3.partition_grads": 3},
    "engine_stage3": {"partition_grads": 2, "update_selected_channels": 1},
    "zenflow_torch_adam": {
        "ZenFlowSelectiveAdamW._step_with_offload.flush_bucket": 1,
        "ZenFlowSelectiveAdamW_stage3._step_with_offload.flush_bucket": 1,
        "ZenFlowSelectiveAdamW._step_without_offload": 1,
        "ZenFlowSelectiveAdamW_stage3._step_without_offload": 1,
        "ZenFlowSelectiveAdamW_stage3._selective_step_one_param": 1,
        "ZenFlowSelectiveAdamW_stage3.temp_copy_param": 1,
        "_fused_adamw": 3,
        "_single_tensor_adamw": 1,
    },
}
#: Of engines without ZeRO.
OTHER_ENGINES = {"offload_states": {"reload_optimizer_states": 1}}


@functools.cache
def functions_of(module):
    """The calls that may copy of each function, also of those that have none; empty where there is no such module."""
    path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    found = {}

    def walk(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = (*inside, child.name)
                found.setdefault(".".join(name), [])
                walk(child, name)
            else:
                if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in COPIES:
                    found.setdefault(".".join(inside), []).append(ast.unparse(child))
                walk(child, inside)

    if path.exists():
        walk(ast.parse(path.read_text()), ())
    return found


def expected():
    """How many calls each function has by the list and by what copies elsewhere."""
    counts = {}
    for site in stage3.COPY_SITES:
        for function, calls in site.functions.items():
            counts[function] = counts.get(function, 0) + calls
    short = {module.rpartition(".")[2]: module for module in NEIGHBOURS if not module.endswith("swap_tensor.utils")}
    for table in (TO_THE_HOST, WITHIN_THE_HOST, WITHIN_THE_DEVICE, OTHER_ENGINES):
        for module, functions in table.items():
            for function, calls in functions.items():
                path = f"{ZERO3}{function}" if module == "stage3" else function
                home = "deepspeed.runtime.swap_tensor.utils" if function.startswith("SwapBuffer") else short[module]
                counts[f"{home}:{path}"] = counts.get(f"{home}:{path}", 0) + calls
    return counts


@pytest.mark.parametrize("site", stage3.COPY_SITES, ids=lambda site: site.name)
def test_each_site_is_in_the_source_and_copies(site):
    first, last = map(Version, site.versions)
    if not first <= HERE <= last:
        pytest.skip(f"It was read in DeepSpeed {first} to {last}, and this is {HERE}.")
    for function, calls in site.functions.items():
        module, _, path = function.partition(":")
        assert len(functions_of(module).get(path, [])) >= calls > 0, function


def test_no_other_function_copies():
    newest = stage3.READ[1]
    if newest != HERE:
        pytest.skip(f"Each call was looked at in DeepSpeed {newest}, and this is {HERE}.")
    found = {
        f"{module}:{function}": len(calls)
        for module in NEIGHBOURS
        for function, calls in functions_of(module).items()
        if calls
    }
    counted = {function: calls for function, calls in expected().items() if calls}
    assert found == counted


def test_the_scan_sees_a_copy_that_is_new(tmp_path, monkeypatch):
    """The comparison above can fail."""
    source = "class A:\n    def step(self):\n        self.flat.data.copy_(self.master.data)\n        x.to('cuda')\n"
    (tmp_path / "module.py").write_text(source)
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    functions_of.cache_clear()
    assert functions_of("deepspeed.module") == {
        "A": [],
        "A.step": ["self.flat.data.copy_(self.master.data)", "x.to('cuda')"],
    }
    functions_of.cache_clear()


def test_every_site_says_what_is_done_and_why():
    names = [site.name for site in stage3.COPY_SITES]
    assert len(set(names)) == len(names)
    for site in stage3.COPY_SITES:
        assert site.answer in (stage3.SERVED, stage3.LEFT, stage3.IMPOSSIBLE)
        assert site.what
        assert site.reason
    for _, _, _, answer, reason in stage3.table():
        if answer == stage3.LEFT:
            assert reason.startswith(("rare", "small", "its source is pinned")), reason


def test_the_table_has_a_row_for_each_site():
    rows = stage3.table()
    assert len(rows) == len(stage3.COPY_SITES)
    assert rows[0] == (
        "copy-back: fp32 masters to the 16-bit partitions; 4P bytes a step",
        "`DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters`",
        "0.16.0 to 0.19.8",
        "served",
        stage3.COPY_SITES[0].reason,
    )
