"""``h2d bench zero3``: real ZeRO-3 steps on the simulated accelerator, and the figures made of them."""

import json

import pytest

from tests.running import run_program, run_python
from transfer.cli.bench_copy import command as bench
from transfer.cli.bench_zero3 import command as bench_zero3
from transfer.cli.bench_zero3.figures import with_figures
from transfer.cli.bench_zero3.transformer import Shape, Transformer

TINY = {"layers": 1, "hidden": 64, "sub_groups": 3, "batch": 1, "sequence": 8, "optimizer": "adamw", "steps": 2}


@pytest.fixture(scope="module")
def two_ranks():
    """The command itself, on two ranks."""
    given = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", value)]
    done = run_python(
        *("-m", "transfer.cli", "bench", "zero3", "--accelerator", "simulated", "--ranks", 2, "--threads", 1),
        *(*given, "--json"),
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


def test_every_copy_back_takes_its_steps_on_two_ranks(two_ranks):
    assert two_ranks["schema_version"] == 1
    assert two_ranks["not_run"] == []
    assert two_ranks["ranks"] == 2
    schemes = {one["scheme"]: one for one in two_ranks["measurements"]}
    assert list(schemes)[:3] == ["deepspeed", "floor", "ring 2 x 2^26"]
    assert "default" in schemes
    assert any(name.startswith("pinned_staged") for name in schemes)
    for name, one in schemes.items():
        assert one["right_bits"] is (None if name == "floor" else True)
        for what in ("step_seconds", "iteration_seconds"):
            by_rank = one[f"{what}_by_rank"]
            assert [len(seconds) for seconds in by_rank] == [2, 2]
            assert one[what] == [max(pair) for pair in zip(*by_rank, strict=True)]
        assert all(step < whole for step, whole in zip(one["step_seconds"], one["iteration_seconds"], strict=True))


def test_the_engine_is_described(two_ranks):
    engine = two_ranks["engine"]
    model = Transformer(Shape(layers=1, hidden=64))
    assert engine["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert 1 < len(engine["sub_group_elements"]) <= 3
    assert engine["master_bytes"] == 4 * sum(engine["sub_group_elements"])
    assert abs(2 * sum(engine["sub_group_elements"]) - engine["parameters"]) < 64, "half of it on each rank"
    assert two_ranks["hardware"]["threads"] == 1


@pytest.fixture(scope="module")
def watched():
    """The worker, with strategies that only the tests have."""
    options = {
        **TINY,
        "accelerator": "simulated",
        "config": None,
        "nvme": None,
        "nvme_pipeline": False,
        "verify_every_step": False,
        "strategies": ["copies_nothing", "pageable", "pinned_direct", "refusing", "wrong_in_one_bit"],
    }
    done = run_program(
        f"""
        import json
        from transfer.cli.measuring.ranks import launch

        worker = "tests.cli.zero3_worker:measure"
        print(json.dumps(launch(worker, {options!r}, threads=1, spawn=True, process_group=False)))
        """,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


def by_strategy(watched):
    """Measurements by the strategy's name: with deferred copies there are two of each, which agree here."""
    return {one["scheme"].partition(",")[0]: one for one in watched["measurements"]}


def test_wrong_bits_are_seen_and_nobody_elses_verdict_is_spoilt(watched):
    verdicts = {name: one["right_bits"] for name, one in by_strategy(watched).items()}
    assert verdicts.pop("copies_nothing") is False
    assert verdicts.pop("wrong_in_one_bit") is False
    assert verdicts.pop("floor") is None
    assert set(verdicts.values()) == {True}
    assert {"deepspeed", "default", "pageable", "pinned_direct", "ring 2 x 2^26"} <= set(verdicts)


def test_partitions_are_right_again_after_the_floor_and_after_wrong_bits(watched):
    sub_groups = len(watched["engine"]["sub_group_elements"])
    # Three rounds of the floor; the two wrong strategies are found out in the first and the last.
    assert len(watched["rewrites"]) >= 3 + 2 * 2
    for before, after in watched["rewrites"]:
        assert before < sub_groups, "the step without a copy leaves values of the step before"
        assert after == sub_groups


def test_masters_are_page_locked_once_a_round_and_only_for_those_that_do_so(watched):
    locked = {one["scheme"].partition(",")[0]: one["page_locked_bytes"] for one in watched["measurements"]}
    assert locked.pop("pinned_direct") == watched["engine"]["master_bytes"]
    locked.pop("default")  # the policy's business
    assert set(locked.values()) == {0}
    (seconds,) = watched["page_lock"]["seconds_by_rank"]
    assert len(seconds) == 3
    assert min(seconds) > 0
    # Once a round, and once when each of them was tried.
    tried = sum(one["page_locked_bytes"] > 0 for one in watched["measurements"])
    assert tried > 1
    assert watched["registrations"] == len(watched["engine"]["sub_group_elements"]) * (3 + tried)


def test_what_cannot_run_is_listed_and_nothing_stays_pinned(watched):
    refused = {(entry["scheme"].partition(",")[0], entry["reason"]) for entry in watched["not_run"]}
    assert refused == {("refusing", "not on this machine")}
    assert watched["pinned_bytes_at_the_end"] == 0


def test_the_table_shows_wrong_bits_and_what_page_locking_cost_and_fails_the_command(watched, capsys, monkeypatch):
    monkeypatch.setattr(bench_zero3, "run_worker", lambda *given, **how: watched)
    assert bench.main(["zero3", "--layers", "1", "--hidden", "64", "--steps", "2"]) == 1
    out = capsys.readouterr().out
    wrong = [one for one in watched["measurements"] if one["right_bits"] is False]
    assert out.count("WRONG") == len(wrong) > 0
    assert "not run: refusing" in out
    assert "page-locking the masters" in out
    engine = watched["engine"]
    assert f"{engine['parameters']:,} parameters (1 layers of 64), {len(engine['sub_group_elements'])} sub-" in out


def test_figures_are_those_of_the_raw_seconds():
    def measured(scheme, steps, rise=None, scratch=0):
        return {
            "scheme": scheme,
            "step_seconds_by_rank": steps,
            "iteration_seconds_by_rank": [[1 + second for second in seconds] for seconds in steps],
            "memory_rise_bytes": rise,
            "scratch_bytes": scratch,
        }

    deepspeed, floor, fast = with_figures(
        [
            measured("deepspeed", [[4.0, 8.0, 6.0], [3.0, 9.0, 6.0]], rise=100),
            measured("floor", [[1.0, 2.0, 1.0], [1.0, 1.0, 1.0]], rise=90),
            measured("fast", [[2.0, 3.0, 2.0], [1.0, 3.0, 4.0]], rise=120, scratch=7),
        ]
    )
    assert fast["step_seconds"] == [2.0, 3.0, 4.0]
    assert fast["iteration_seconds"] == [3.0, 4.0, 5.0]
    assert fast["figures"] == {
        "median_step_seconds": 3.0,
        "median_iteration_seconds": 4.0,
        "spread_percent": pytest.approx(100 / 3),
        "times_deepspeed": 2.0,  # of 4/2, 9/3 and 6/4
        "iteration_times_deepspeed": pytest.approx(5 / 3),  # of 5/3, 10/4 and 7/5
        "times_floor": 2.0,  # of 2/1, 3/2 and 4/1
        "copy_back_seconds": 1.0,  # of 1, 1 and 3
        "copy_back_share": 0.5,  # of 1/2, 1/3 and 3/4
        "device_bytes": 27,
    }
    assert deepspeed["figures"]["device_bytes"] == 0
    assert floor["figures"]["copy_back_seconds"] == 0


def test_memory_that_nobody_can_tell_is_not_made_up():
    one = {
        "step_seconds_by_rank": [[1.0]],
        "iteration_seconds_by_rank": [[2.0]],
        "memory_rise_bytes": None,
        "scratch_bytes": 3,
    }
    for measured in with_figures([{**one, "scheme": "deepspeed"}, {**one, "scheme": "floor"}]):
        assert measured["figures"]["device_bytes"] is None


@pytest.mark.parametrize("wanted", [10**6, 10**8, 10**9, 10**10])
def test_a_model_has_about_the_parameters_asked_for(wanted):
    shape = Shape.of(wanted)
    block = 12 * shape.hidden**2 + 13 * shape.hidden  # matrices and biases, and two layer norms
    assert shape.layers * block == pytest.approx(wanted, rel=0.3 if wanted < 10**8 else 0.06)
    assert shape.hidden % 64 == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--layers", "2"], "--layers and --hidden go together"),
        (["--layers", "2", "--hidden", "100"], "expected a multiple of 64, not 100"),
        (["--layers", "2", "--hidden", "64", "--parameters", "1e6"], "either --parameters or"),
        (["--optimizer", "sgd"], "invalid choice"),
        (["--strategies", "pinned_stage"], "pinned_staged"),
    ],
)
def test_wrong_arguments_end_with_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        bench.main(["zero3", *arguments])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_failing_rank_is_an_error_and_no_json():
    done = run_python(
        *("-m", "transfer.cli", "bench", "zero3", "--accelerator", "cuda", "--layers", 1, "--hidden", 64, "--json"),
        environment={"CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "h2d bench: transfer.cli.bench_zero3.worker:measure failed on 1 ranks" in done.stderr


def test_a_limit_ends_the_measurement_with_what_fits(tmp_path):
    given = [word for key, value in TINY.items() if key != "steps" for word in (f"--{key.replace('_', '-')}", value)]
    done = run_python(
        *("-m", "transfer.cli", "bench", "zero3", "--accelerator", "simulated", "--threads", 1, "--json"),
        *(*given, "--steps", 10_000, "--limit", 4, "--strategies", "pageable"),
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    measured = json.loads(done.stdout)["measurements"]
    steps = {len(one["step_seconds"]) for one in measured}
    assert len(steps) == 1
    assert 0 < steps.pop() < 10_000
    assert {one["right_bits"] for one in measured} == {True, None}
