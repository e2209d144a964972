"""Real ZeRO-3 training: the interface against DeepSpeed untouched, parameter for parameter, bit for bit.

Two gloo ranks on the simulated accelerator, where a copy that nobody waits for does not happen; the
same tests on CUDA, on one GPU and on two where there are two.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerators.testing import unavailable_reason

STAGED = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 1000}}
DIRECT = {"strategy": "pinned_direct", "fallback": False}
IN_CHUNKS = {**DIRECT, "pinned_direct": {"mapped": False, "chunk_elements": 1000}}
PLAIN_RUNS = [
    {"name": "deepspeed", "how": "none"},
    {"name": "pageable", "how": "attach", "transfer": {"strategy": "pageable"}},
    {"name": "staged", "how": "attach", "transfer": STAGED},
    {"name": "installed", "how": "install", "transfer": STAGED},
    {"name": "section", "how": "section", "section": STAGED},
    {"name": "direct", "how": "attach", "transfer": DIRECT},
    {"name": "direct in chunks", "how": "install", "transfer": IN_CHUNKS},
    {"name": "direct, immediate", "how": "section", "section": {**IN_CHUNKS, "completion": "immediate"}},
    {"name": "staged, immediate", "how": "attach", "transfer": {**STAGED, "completion": "immediate"}},
]
DIRECT_RUNS = ("direct", "direct in chunks", "direct, immediate")
STAGED_RUNS = ("staged", "installed", "section", "staged, immediate")


def cases():
    """Identifier, world size, and the spec of each training comparison that this machine can run."""
    yield "simulated", 2, {"accelerator": "simulated", "dtype": "bf16", "optimizer": "AdamW"}
    gpus = torch.cuda.device_count()
    for world_size in (1, 2):
        for dtype in ("bf16", "fp16"):
            for ratio in (1.0, 0.5):
                spec = {
                    "accelerator": "cuda",
                    "dtype": dtype,
                    "optimizer": "DeepSpeedCPUAdam",
                    "offload_optimizer": {"ratio": ratio},
                }
                if world_size <= max(gpus, 1):  # one case skips, or fails when required, without a GPU
                    yield f"cuda-{world_size}-{dtype}-{ratio}", world_size, spec
                if not gpus:
                    return


CASES = {name: (world_size, spec) for name, world_size, spec in cases()}


def train(spec, runs, world_size, out):
    """Trains each of ``runs`` on ``world_size`` ranks; returns what each rank saved, by run and rank."""
    (out / "spec.json").write_text(json.dumps({**spec, "runs": runs}))
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    worker = [str(Path(__file__).with_name("worker.py")), str(out / "spec.json"), str(out)]
    done = subprocess.run([*launch, *worker], env=environment, timeout=280, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return {run["name"]: [torch.load(out / f"{run['name']}-{rank}.pt") for rank in range(world_size)] for run in runs}


def skip_or_fail(accelerator, config):
    reason = unavailable_reason(accelerator)
    if reason is not None and accelerator in config.getoption("--require-accelerator"):
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module", params=sorted(CASES))
def trained(request, tmp_path_factory):
    world_size, spec = CASES[request.param]
    skip_or_fail(spec["accelerator"], request.config)
    return train(spec, PLAIN_RUNS, world_size, tmp_path_factory.mktemp("trained"))


def test_training_did_something(trained):
    for result in trained["deepspeed"]:
        assert result["losses"][0] > result["losses"][-1] > 0
        assert result["sub_groups"] > 1


def test_parameters_are_bitwise_those_of_deepspeed(trained):
    for results in trained.values():
        for got, expected in zip(results, trained["deepspeed"], strict=True):
            assert got["digest"] == expected["digest"]
            assert got["losses"] == expected["losses"]
            for what in ("partitions", "parameters"):
                for mine, theirs in zip(got[what], expected[what], strict=True):
                    assert torch.equal(mine, theirs)


def test_every_master_on_the_host_goes_through_the_interface(trained):
    for name, results in trained.items():
        for result in results:
            expected = 0 if name == "deepspeed" else 3 * result["masters_on_host"]
            if result["submitted"] > expected > 0:  # the last master of each step went in tiles
                assert "immediate" not in name
                assert result["optimizer"] == "DeepSpeedCPUAdam"
            else:
                assert result["submitted"] == expected
            assert 0 < result["masters_on_host"] <= result["sub_groups"]


def test_waits_are_left_to_the_end_of_the_step_unless_told_otherwise(trained):
    for name, results in trained.items():
        for result in results:
            assert result["waited_at_once"] == (result["submitted"] if "immediate" in name else 0)


def test_each_run_pins_what_its_strategy_needs(trained):
    for name, results in trained.items():
        for result in results:
            # Two buffers of 1,000 elements of 2 bytes.
            staging = 4000 if name in STAGED_RUNS else 0
            masters = result["host_master_bytes"] if name in DIRECT_RUNS else 0
            assert (result["pinned_bytes"], result["page_locked_bytes"]) == (staging + masters, masters)
            assert set(result["stats"]) <= {"pageable", "pinned_direct", "pinned_staged"}
            direct = result["stats"].get("pinned_direct", {"copies": 0})["copies"]
            assert direct == (result["submitted"] if name in DIRECT_RUNS else 0)


def test_nothing_stays_pinned_or_hooked(trained):
    for results in trained.values():
        for result in results:
            assert result["pinned_bytes_after_destroy"] == 0
            assert result["hooks_left"] == 0


def test_partial_offload_left_masters_on_the_device(trained, request):
    case = request.node.callspec.params["trained"]
    if not case.endswith("0.5"):
        pytest.skip("This run keeps every master on the host.")
    for result in trained["staged"]:
        assert result["masters_on_host"] < result["sub_groups"]


def same(got, expected):
    assert got["digest"] == expected["digest"]
    assert got["losses"] == expected["losses"]
    assert len(got["seen"]) == len(expected["seen"])
    assert all(torch.equal(*pair) for pair in zip(got["seen"], expected["seen"], strict=True))


DEFERRED_RUNS = [
    {"name": "deepspeed", "how": "none"},
    {"name": "staged", "how": "attach", "transfer": STAGED},
    {"name": "direct", "how": "attach", "transfer": DIRECT},
    {"name": "direct in chunks", "how": "attach", "transfer": IN_CHUNKS},
]


@pytest.mark.parametrize("seed", [0, 1])
def test_everything_that_reads_the_model_between_steps_sees_finished_copies(tmp_path, seed):
    """Evaluation, fp32 parameters, checkpoints saved and loaded; gradients accumulate over two batches."""
    spec = {
        "accelerator": "simulated",
        "seed": seed,
        "dtype": "bf16",
        "optimizer": "AdamW",
        "steps": 6,
        "look_between": str(tmp_path / "checkpoints"),
        "deepspeed": {"gradient_accumulation_steps": 2},
    }
    results = train(spec, DEFERRED_RUNS, 2, tmp_path)
    assert results["deepspeed"][0]["seen"]
    for got in results.values():
        for mine, theirs in zip(got, results["deepspeed"], strict=True):
            same(mine, theirs)


def test_steps_that_overflow_are_skipped(tmp_path):
    spec = {"accelerator": "simulated", "dtype": "fp16", "optimizer": "AdamW", "overflows": True, "steps": 14}
    results = train(spec, DEFERRED_RUNS, 2, tmp_path)
    for name, got in results.items():
        for mine, theirs in zip(got, results["deepspeed"], strict=True):
            same(mine, theirs)
            assert 0 < mine["skipped"] < 14
            assert mine["submitted"] == (0 if name == "deepspeed" else (14 - mine["skipped"]) * mine["sub_groups"])


def test_the_monitor_shows_what_each_step_copied(tmp_path):
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "h2d"}
    spec = {"accelerator": "simulated", "dtype": "bf16", "optimizer": "AdamW", "deepspeed": {"csv_monitor": monitor}}
    runs = [{"name": "direct", "how": "attach", "transfer": DIRECT}]
    result = train(spec, runs, 2, tmp_path)["direct"][0]
    rows = (tmp_path / "csv" / "h2d" / "Train_H2D_pinned_direct_bytes.csv").read_text().splitlines()
    header, *values = [row.split(",") for row in rows]
    # Four samples a step: two ranks with two each.
    assert [int(float(step)) for step, _ in values] == [4, 8, 12]
    assert header[1] == "Train_H2D_pinned_direct_bytes" or "bytes" in header[1]
    assert [float(value) for _, value in values] == [result["stats"]["pinned_direct"]["bytes"] / 3] * 3


def test_a_copy_that_nobody_waits_for_is_noticed(tmp_path):
    """The comparison above can fail: on the simulated accelerator it does without the final wait."""
    runs = [{"name": "deepspeed", "how": "none"}, {"name": "forgets", "how": "forgets_to_wait"}]
    results = train(CASES["simulated"][1], runs, 2, tmp_path)
    assert results["forgets"][0]["submitted"] == 6
    assert results["forgets"][0]["digest"] != results["deepspeed"][0]["digest"]


@pytest.mark.parametrize(
    "special",
    [
        {"zero": {"offload_param": {"device": "cpu"}}, "partitions_on_host": True},
        {"dtype": "autocast", "offload_optimizer": {"device": "none"}},
        {"offload_optimizer": {"device": "none"}},
    ],
    ids=["offload_param", "autocast", "no_offload"],
)
def test_deepspeeds_own_code_runs_where_nothing_crosses(tmp_path, special):
    """Low-precision partitions on the host, partitions that are their own masters, masters on the device."""
    spec = {"accelerator": "simulated", "dtype": "bf16", "optimizer": "AdamW", **special}
    runs = [run for run in PLAIN_RUNS if run["name"] in ("deepspeed", "staged")]
    results = train(spec, runs, 2, tmp_path)
    for got, expected in zip(results["staged"], results["deepspeed"], strict=True):
        assert got["submitted"] == 0
        assert got["pinned_bytes"] == 0
        assert got["digest"] == expected["digest"]
        assert got["losses"] == expected["losses"]


def test_fp32_partitions_under_autocast_cross_too(tmp_path):
    spec = {"accelerator": "simulated", "dtype": "autocast", "optimizer": "AdamW"}
    runs = [run for run in PLAIN_RUNS if run["name"] in ("deepspeed", "staged")]
    results = train(spec, runs, 2, tmp_path)
    for got, expected in zip(results["staged"], results["deepspeed"], strict=True):
        assert got["submitted"] == 6
        assert got["pinned_bytes"] == 8000
        assert got["digest"] == expected["digest"]
