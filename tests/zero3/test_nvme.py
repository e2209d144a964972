"""Real ZeRO-3 training with optimizer state on NVMe: the interface against DeepSpeed untouched, bit for bit.

Two sub-groups of 1,049,088 and 1,049,600 elements a rank are swapped; the last bias, 512 elements, is too
small for that and stays in memory. The swap files lie on a disk.
"""

import os

import pytest
import torch

from accelerators.testing import unavailable_reason
from tests.zero3.launching import DIRECT, IN_CHUNKS, LAUNCH_SECONDS, STAGED, all_same, launch

NO_AIO = "DeepSpeed's aio op takes minutes to build; H2D_TEST_AIO=1 asks for it."

pytestmark = [
    pytest.mark.skipif("H2D_TEST_AIO" not in os.environ, reason=NO_AIO),
    pytest.mark.slow,
    pytest.mark.timeout(LAUNCH_SECONDS + 100),
]

RUNS = [
    {"name": "deepspeed", "how": "none"},
    {"name": "pageable", "how": "attach", "transfer": {"strategy": "pageable"}},
    {"name": "staged", "how": "attach", "transfer": STAGED},
    {"name": "direct", "how": "attach", "transfer": DIRECT},
    {"name": "direct in chunks", "how": "install", "transfer": IN_CHUNKS},
    {"name": "immediate", "how": "section", "section": {**DIRECT, "completion": "immediate"}},
]
FEW_RUNS = [run for run in RUNS if run["name"] in ("deepspeed", "staged", "direct")]
SWAPPED = (1_049_088, 1_049_600)
IN_MEMORY = 512
#: Of three sub-groups at once where reads and writes are pipelined.
BUFFERS = 12
#: Both are 33 of these. In the first step, which DeepSpeed swaps, at least half of what is left is one copy: 6 of them.
#: In the others, each tile is one.
TILE_ELEMENTS = 2**15
COPIES, TILES = 6 + 6 + 1, 33 + 33 + 1
PIPELINED = {"pipeline_read": True, "pipeline_write": True}

pipelining = pytest.mark.parametrize("pipeline", [{}, PIPELINED], ids=["plain", "pipelined"])


def spec_of(tmp_path, pipeline=(), **more):
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "swap"), "buffer_count": BUFFERS, **dict(pipeline)}
    return {
        "accelerator": "cuda" if unavailable_reason("cuda") is None else "simulated",
        "dtype": "bf16",
        "optimizer": "DeepSpeedCPUAdam",
        "width": 1024,
        "tile_elements": TILE_ELEMENTS,
        "offload_optimizer": offload,
        **more,
        "zero": {"sub_group_size": 600_000, **more.get("zero", {})},
    }


def trained(spec, runs, tmp_path):
    """What each run saved, after the comparison with DeepSpeed untouched."""
    world_size = 1 if spec["accelerator"] == "cuda" and torch.cuda.device_count() == 1 else 2
    results = launch({"nvme": {**spec, "runs": runs}}, world_size, tmp_path)["nvme"]
    all_same(results)
    for got in results.values():
        for mine in got:
            assert mine["pinned_bytes_after_destroy"] == mine["patches_left"] == 0
    return results


@pipelining
def test_swapped_masters_go_in_tiles_out_of_page_locked_buffers(tmp_path, pipeline):
    results = trained(spec_of(tmp_path, pipeline), RUNS, tmp_path)
    swap_buffers = (BUFFERS * max(SWAPPED) + IN_MEMORY) * 4
    for name, got in results.items():
        for mine in got if len(got) == 2 else ():  # the numbers of elements are those of two ranks
            assert mine["sub_groups"] == 3
            assert mine["submitted"] == {"deepspeed": 0, "immediate": 3 * 3}.get(name, COPIES + 2 * TILES)
            direct = name.startswith("direct") or name == "immediate"
            if name == "immediate":
                assert mine["page_locked_bytes"] == swap_buffers
            elif direct:  # the masters of eight tiles, whatever the swap buffers have
                masters = 8 * 4 * TILE_ELEMENTS
                assert masters < mine["page_locked_bytes"] < 2 * masters
            else:
                assert mine["page_locked_bytes"] == 0
            assert mine["stats"].get("pinned_direct", {"copies": 0})["copies"] == (mine["submitted"] if direct else 0)


@pipelining
def test_a_checkpoint_is_restored_from_the_masters_files(tmp_path, pipeline):
    spec = spec_of(tmp_path, pipeline, steps=5, rewind=str(tmp_path / "checkpoints"))
    for name, got in trained(spec, FEW_RUNS, tmp_path).items():
        for mine in got:
            assert len(mine["seen"]) == 3
            # Five steps, and a checkpoint: two files, and a master in memory that is waited for.
            expected = COPIES + 4 * TILES + 3 if len(got) == 2 and name != "deepspeed" else mine["submitted"]
            assert mine["submitted"] == expected
            assert mine["waited_at_once"] == (0 if name == "deepspeed" else 1)
            assert mine["stats"].get("nvme_swapped", {"copies": 0})["copies"] == (0 if name == "deepspeed" else 2)
    resumed = trained({**spec, "resume": spec["rewind"], "rewind": None, "steps": 2}, FEW_RUNS, tmp_path)
    for mine in resumed["direct"]:
        assert (len(mine["seen"]), mine["waited_at_once"]) == (3, 1)


@pipelining
def test_everything_that_reads_the_model_between_steps_sees_finished_copies(tmp_path, pipeline):
    spec = spec_of(tmp_path, pipeline, look_between=str(tmp_path / "checkpoints"))
    assert trained(spec, FEW_RUNS, tmp_path)["deepspeed"][0]["seen"]


def test_steps_that_overflow_are_skipped(tmp_path):
    results = trained(spec_of(tmp_path, dtype="fp16", overflows=True, steps=14), FEW_RUNS, tmp_path)
    for mine in results["direct"]:
        assert 0 < mine["skipped"] < 14


@pipelining
def test_parameters_on_nvme_stay_with_deepspeed(tmp_path, pipeline):
    offload_param = {
        "device": "nvme",
        "nvme_path": str(tmp_path / "swap"),
        "buffer_count": 8,
        "buffer_size": 600_000,
        "max_in_cpu": 0,
    }
    zero = {"offload_param": offload_param, "stage3_param_persistence_threshold": 2_000}
    results = trained(spec_of(tmp_path, pipeline, zero=zero), FEW_RUNS, tmp_path)
    for name in ("staged", "direct"):
        for mine in results[name]:
            assert mine["waited_at_once"] == mine["submitted"] == 0
