"""Real ZeRO-3 training: the interface against DeepSpeed untouched, parameter for parameter, bit for bit.

Two gloo ranks on the simulated accelerator, where a copy that is not waited for does not happen; the
same tests on CUDA, on one GPU and on two where there are two. One launch trains everything on the simulated
accelerator.
"""

import pytest
import torch

from accelerators.testing import accelerator_or_skip
from tests.zero3.launching import DIRECT, IN_CHUNKS, STAGED, all_same, launch

# A launch has a time limit of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]

DEEPSPEED = {"name": "deepspeed", "how": "none"}
PLAIN_RUNS = [
    DEEPSPEED,
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
DEFERRED_RUNS = [run for run in PLAIN_RUNS if run["name"] in ("deepspeed", "staged", "direct", "direct in chunks")]
STAGED_ALONE = [run for run in PLAIN_RUNS if run["name"] in ("deepspeed", "staged")]
CPU_ADAM_RUNS = [
    DEEPSPEED,
    {"name": "direct", "how": "attach", "transfer": DIRECT},
    {"name": "staged", "how": "attach", "transfer": STAGED},
    {"name": "immediate", "how": "attach", "transfer": {**DIRECT, "completion": "immediate"}},
]
#: Where no copy goes from host to device.
NOTHING_TO_COPY = {
    "partitions on the host": {"zero": {"offload_param": {"device": "cpu"}}, "partitions_on_host": True},
    "masters on the device": {"offload_optimizer": {"device": "none"}},
    "partitions that are masters": {"dtype": "autocast", "offload_optimizer": {"device": "none"}},
}


def simulated_specs(folder, *, cpu_adam):
    """Everything that two ranks train on the simulated accelerator, by name."""

    def spec(runs, **more):
        return {"accelerator": "simulated", "dtype": "bf16", "optimizer": "AdamW", "runs": runs, **more}

    monitor = {"enabled": True, "output_path": str(folder / "csv"), "job_name": "h2d"}
    forgets = [DEEPSPEED, {"name": "forgets", "how": "forgets_to_wait"}]
    specs = {"plain": spec(PLAIN_RUNS), "forgets": spec(forgets)}
    for seed in (0, 1):
        specs[f"looked at, {seed}"] = spec(
            DEFERRED_RUNS,
            seed=seed,
            steps=6,
            look_between=str(folder / f"looked at {seed}"),
            deepspeed={"gradient_accumulation_steps": 2},
        )
    specs["overflows"] = spec(DEFERRED_RUNS, dtype="fp16", overflows=True, steps=14)
    specs["monitor"] = spec(CPU_ADAM_RUNS[1:2], deepspeed={"csv_monitor": monitor})
    if cpu_adam:
        for eager in (False, True):
            checkpoints = str(folder / f"tiles {eager}")
            specs[f"tiles, eager: {eager}"] = spec(
                CPU_ADAM_RUNS, optimizer="DeepSpeedCPUAdam", eager=eager, look_between=checkpoints
            )
    specs |= {name: spec(STAGED_ALONE, **special) for name, special in NOTHING_TO_COPY.items()}
    specs["autocast"] = spec(STAGED_ALONE, dtype="autocast")
    return specs


@pytest.fixture(scope="module")
def simulated_training(tmp_path_factory, why_no_cpu_adam):
    folder = tmp_path_factory.mktemp("training")
    specs = simulated_specs(folder, cpu_adam=why_no_cpu_adam is None)
    return {**launch(specs, 2, folder), "folder": folder}


def cases():
    """Identifier, world size, and the spec of each training comparison that this machine can run."""
    yield "simulated", 2, None
    gpus = torch.cuda.device_count()
    for world_size in (1, 2):
        for dtype in ("bf16", "fp16"):
            for ratio in (1.0, 0.5):
                offload = {"ratio": ratio}
                spec = {"dtype": dtype, "optimizer": "DeepSpeedCPUAdam", "offload_optimizer": offload}
                if world_size <= max(gpus, 1):  # one case skips, or fails when required, without a GPU
                    yield f"cuda-{world_size}-{dtype}-{ratio}", world_size, spec
                if not gpus:
                    return


CASES = {name: (world_size, spec) for name, world_size, spec in cases()}


@pytest.fixture(scope="module")
def cuda_training(tmp_path_factory):
    """Gives what one case has trained on CUDA; the first one of a world size trains all of them."""
    done = {}

    def trained(case):
        world_size = CASES[case][0]
        if world_size not in done:
            specs = {
                name: {**spec, "accelerator": "cuda", "runs": PLAIN_RUNS}
                for name, (ranks, spec) in CASES.items()
                if spec is not None and ranks == world_size
            }
            done[world_size] = launch(specs, world_size, tmp_path_factory.mktemp("training"))
        return done[world_size][case]

    return trained


@pytest.fixture(params=sorted(CASES))
def trained(request, cuda_training):
    if request.param == "simulated":
        return request.getfixturevalue("simulated_training")["plain"]
    accelerator_or_skip("cuda", request.config)
    return cuda_training(request.param)


def test_training_did_something(trained):
    for result in trained["deepspeed"]:
        assert result["losses"][0] > result["losses"][-1] > 0
        assert result["sub_groups"] > 1


def test_parameters_are_bitwise_those_of_deepspeed(trained):
    all_same(trained)


def test_every_master_on_the_host_goes_through_the_interface(trained):
    for name, results in trained.items():
        for result in results:
            expected = 0 if name == "deepspeed" else 3 * result["masters_on_host"]
            if result["submitted"] > expected > 0:  # the masters went in tiles
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


def test_nothing_stays_pinned_or_patched(trained):
    for results in trained.values():
        for result in results:
            assert result["pinned_bytes_after_destroy"] == 0
            assert result["patches_left"] == 0


def test_partial_offload_left_masters_on_the_device(trained, request):
    case = request.node.callspec.params["trained"]
    if not case.endswith("0.5"):
        pytest.skip("This run keeps every master on the host.")
    for result in trained["staged"]:
        assert result["masters_on_host"] < result["sub_groups"]


@pytest.mark.parametrize("seed", [0, 1])
def test_everything_that_reads_the_model_between_steps_sees_finished_copies(simulated_training, seed):
    """Evaluation, fp32 parameters, checkpoints saved and loaded; gradients accumulate over two batches."""
    results = simulated_training[f"looked at, {seed}"]
    assert results["deepspeed"][0]["seen"]
    all_same(results)


def test_steps_that_overflow_are_skipped(simulated_training):
    results = simulated_training["overflows"]
    all_same(results)
    for name, got in results.items():
        for mine in got:
            assert 0 < mine["skipped"] < 14
            assert mine["submitted"] == (0 if name == "deepspeed" else (14 - mine["skipped"]) * mine["sub_groups"])


def test_the_monitor_shows_what_each_step_copied(simulated_training):
    result = simulated_training["monitor"]["direct"][0]
    file = simulated_training["folder"] / "csv" / "h2d" / "Train_H2D_pinned_direct_bytes.csv"
    header, *values = [row.split(",") for row in file.read_text().splitlines()]
    # Four samples a step: two ranks with two each.
    assert [int(float(step)) for step, _ in values] == [4, 8, 12]
    assert "bytes" in header[1]
    assert [float(value) for _, value in values] == [result["stats"]["pinned_direct"]["bytes"] / 3] * 3


def test_a_copy_that_is_not_waited_for_is_noticed(simulated_training):
    """The comparison above can fail: on the simulated accelerator it does without the final wait."""
    results = simulated_training["forgets"]
    assert results["forgets"][0]["submitted"] == 6
    assert results["forgets"][0]["digest"] != results["deepspeed"][0]["digest"]


@pytest.mark.parametrize("special", sorted(NOTHING_TO_COPY))
def test_deepspeeds_own_code_runs_where_no_copy_goes_from_host_to_device(simulated_training, special):
    results = simulated_training[special]
    all_same(results)
    for got in results["staged"]:
        assert got["submitted"] == got["pinned_bytes"] == 0


def test_fp32_partitions_under_autocast_are_copied_too(simulated_training):
    results = simulated_training["autocast"]
    all_same(results)
    for got in results["staged"]:
        assert got["submitted"] == 6
        assert got["pinned_bytes"] == 8000


@pytest.mark.parametrize("eager", [False, True], ids=["late", "early"])
def test_training_with_cpu_adam_is_bitwise_that_of_deepspeed(cpu_adam, simulated_training, eager):
    results = simulated_training[f"tiles, eager: {eager}"]
    all_same(results)
    for mine in results["immediate"]:
        assert mine["submitted"] == (3 + 1) * mine["sub_groups"], "three steps, and a checkpoint that is loaded"
    for name in ("direct", "staged"):
        for mine in results[name]:
            assert mine["submitted"] > results["immediate"][0]["submitted"] > 0, "the masters went in tiles"
