"""``h2d bench zero3``: real ZeRO-3 steps on the simulated accelerator, and the figures made of them."""

import json
import time

import pytest

from tests.running import run_program
from transfer import cli
from transfer.cli.bench_zero3 import command as bench_zero3
from transfer.cli.bench_zero3 import worker as zero3_worker
from transfer.cli.bench_zero3.report import with_figures
from transfer.cli.bench_zero3.transformer import Transformer, shape_of
from transfer.cli.measuring.ranks import Ranks, RanksFailedError

TINY = {"layers": 1, "hidden": 64, "sub_groups": 3, "batch": 1, "sequence": 8, "optimizer": "adamw", "steps": 2}
WORDS = [str(word) for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", value)]


@pytest.fixture(scope="module")
def watched():
    """The one launch: the worker on two ranks, with strategies that only the tests have."""
    options = {
        **TINY,
        "accelerator": "simulated",
        "config": None,
        "nvme": None,
        "nvme_pipeline": False,
        "verify": [],
        "limit_seconds": None,
        "strategies": ["copies_nothing", "pageable", "pinned_direct", "refusing", "wrong_in_one_bit"],
    }
    done = run_program(
        f"""
        import json
        from transfer.cli.measuring.ranks import launch

        worker = "tests.cli.zero3_worker:measure"
        print(json.dumps(launch(worker, {options!r}, 2, threads=1, deepspeed=True)))
        """,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


@pytest.fixture
def report(watched, monkeypatch, capsys):
    """What the command prints of it as JSON."""
    monkeypatch.setattr(bench_zero3, "launch", lambda *given, **how: watched)
    assert cli.main(["bench", "zero3", *WORDS, "--ranks", "2", "--json"]) == 1
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_every_copy_back_takes_its_steps_on_two_ranks(report):
    assert report["schema_version"] == 3
    assert report["ranks"] == 2
    variants = {one["variant"]: one for one in report["measurements"]}
    assert list(variants)[:3] == ["deepspeed", "no copy-back", "ring 2 x 2^26"]
    assert {"default", "pinned_direct, immediate", "pinned_direct, deferred"} <= set(variants)
    for one in variants.values():
        for what in ("step_seconds", "iteration_seconds"):
            by_rank = one[f"{what}_by_rank"]
            assert [len(seconds) for seconds in by_rank] == [2, 2]
            assert one[what] == [max(pair) for pair in zip(*by_rank, strict=True)]
        assert all(step < whole for step, whole in zip(one["step_seconds"], one["iteration_seconds"], strict=True))


@pytest.mark.slow
def test_the_engine_is_described(report):
    engine = report["engine"]
    model = Transformer(layers=1, hidden=64)
    assert engine["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert 1 < len(engine["sub_group_elements"]) <= 3
    assert engine["master_bytes"] == 4 * sum(engine["sub_group_elements"])
    assert abs(2 * sum(engine["sub_group_elements"]) - engine["parameters"]) < 64, "half of it on each rank"
    assert report["hardware"]["threads"] == 1


def by_strategy(watched):
    """Measurements by the strategy's name: with deferred copies there are two of each, which agree here."""
    return {one["variant"].partition(",")[0]: one for one in watched["measurements"]}


@pytest.mark.slow
def test_wrong_bits_are_seen_and_no_other_verdict_is_spoilt(watched):
    verdicts = {name: one["right_bits"] for name, one in by_strategy(watched).items()}
    assert verdicts.pop("copies_nothing") is False
    assert verdicts.pop("wrong_in_one_bit") is False
    assert verdicts.pop("no copy-back") is None
    assert set(verdicts.values()) == {True}
    assert {"deepspeed", "default", "pageable", "pinned_direct", "ring 2 x 2^26"} <= set(verdicts)


@pytest.mark.slow
def test_partitions_are_right_again_without_a_copy_back_and_after_wrong_bits(watched):
    sub_groups = len(watched["engine"]["sub_group_elements"])
    # Three rounds without a copy-back; the two wrong strategies are found out in the first and the last.
    assert len(watched["rewrites"]) >= 3 + 2 * 2
    for before, after in watched["rewrites"]:
        assert before < sub_groups, "the step without a copy leaves values of the step before"
        assert after == sub_groups


@pytest.mark.slow
def test_masters_are_page_locked_once_a_round_and_only_for_those_that_do_so(watched):
    locked = {one["variant"].partition(",")[0]: one["page_locked_bytes"] for one in watched["measurements"]}
    assert locked.pop("pinned_direct") == watched["engine"]["master_bytes"]
    locked.pop("default")  # the policy's business
    assert set(locked.values()) == {0}
    for seconds in watched["page_lock"]["seconds_by_rank"]:
        assert len(seconds) == 3
        assert min(seconds) > 0
    # Once a round, and once when each of them was tried.
    tried = sum(one["page_locked_bytes"] > 0 for one in watched["measurements"])
    assert tried > 1
    assert watched["registrations"] == len(watched["engine"]["sub_group_elements"]) * (3 + tried)


@pytest.mark.slow
def test_what_cannot_run_is_listed_and_nothing_stays_pinned(watched):
    refused = {(entry["variant"].partition(",")[0], entry["reason"]) for entry in watched["not_run"]}
    assert refused == {("refusing", "not on this machine")}
    assert watched["pinned_bytes_at_the_end"] == 0


@pytest.mark.slow
def test_the_table_shows_wrong_bits_and_what_page_locking_cost_and_fails_the_command(watched, capsys, monkeypatch):
    monkeypatch.setattr(bench_zero3, "launch", lambda *given, **how: watched)
    assert cli.main(["bench", "zero3", "--layers", "1", "--hidden", "64", "--steps", "2"]) == 1
    out = capsys.readouterr().out
    wrong = [one for one in watched["measurements"] if one["right_bits"] is False]
    assert out.count("WRONG") == len(wrong) > 0
    assert "not run: refusing" in out
    assert "page-locking the masters" in out
    engine = watched["engine"]
    assert f"{engine['parameters']:,} parameters (1 layers of 64), {len(engine['sub_group_elements'])} sub-" in out


def test_figures_are_those_of_the_raw_seconds():
    def measured(variant, steps, rise=None, scratch=0):
        return {
            "variant": variant,
            "step_seconds_by_rank": steps,
            "forward_seconds_by_rank": [[0.25] * len(seconds) for seconds in steps],
            "backward_seconds_by_rank": [[0.75] * len(seconds) for seconds in steps],
            "iteration_seconds_by_rank": [[1 + second for second in seconds] for seconds in steps],
            "memory_rise_bytes": rise,
            "scratch_bytes": scratch,
        }

    deepspeed, none, fast = with_figures(
        [
            measured("deepspeed", [[4.0, 8.0, 6.0], [3.0, 9.0, 6.0]], rise=100),
            measured("no copy-back", [[1.0, 2.0, 1.0], [1.0, 1.0, 1.0]], rise=90),
            measured("fast", [[2.0, 3.0, 2.0], [1.0, 3.0, 4.0]], rise=120, scratch=7),
        ]
    )
    assert fast["step_seconds"] == [2.0, 3.0, 4.0]
    assert fast["iteration_seconds"] == [3.0, 4.0, 5.0]
    assert fast["figures"] == {
        "median_step_seconds": 3.0,
        "median_forward_seconds": 0.25,
        "median_backward_seconds": 0.75,
        "median_iteration_seconds": 4.0,
        "spread_percent": pytest.approx(100 / 3),
        "times_deepspeed": 2.0,  # of 4/2, 9/3 and 6/4
        "iteration_times_deepspeed": pytest.approx(5 / 3),  # of 5/3, 10/4 and 7/5
        "times_lower_bound": 2.0,  # of 2/1, 3/2 and 4/1
        "copy_back_seconds": 1.0,  # of 1, 1 and 3
        "copy_back_share": 0.5,  # of 1/2, 1/3 and 3/4
        "device_bytes": 27,
    }
    assert deepspeed["figures"]["device_bytes"] == 0
    assert none["figures"]["copy_back_seconds"] == 0


def test_memory_that_is_unknown_is_not_made_up():
    one = {
        "step_seconds_by_rank": [[1.0]],
        "forward_seconds_by_rank": [[0.5]],
        "backward_seconds_by_rank": [[0.5]],
        "iteration_seconds_by_rank": [[2.0]],
        "memory_rise_bytes": None,
        "scratch_bytes": 3,
    }
    for measured in with_figures([{**one, "variant": "deepspeed"}, {**one, "variant": "no copy-back"}]):
        assert measured["figures"]["device_bytes"] is None


@pytest.mark.parametrize("wanted", [10**6, 10**8, 10**9, 10**10])
def test_a_model_has_about_the_parameters_asked_for(wanted):
    layers, hidden = shape_of(wanted)
    block = 12 * hidden**2 + 13 * hidden  # matrices and biases, and two layer norms
    assert layers * block == pytest.approx(wanted, rel=0.3 if wanted < 10**8 else 0.06)
    assert hidden % 64 == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--layers", "2"], "--layers and --hidden go together"),
        (["--layers", "2", "--hidden", "100"], "expected a multiple of 64, not 100"),
        (["--layers", "2", "--hidden", "64", "--parameters", "1e6"], "either --parameters or"),
        (["--optimizer", "sgd"], "invalid choice"),
        (["--peers", "fsdp"], "fsdp is none of offload_param, superoffload, fsdp2"),
        (["--strategies", "pinned_stage"], "pinned_staged"),
    ],
)
def test_wrong_arguments_end_with_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "zero3", *arguments])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_failing_rank_is_an_error_and_no_json(capsys, monkeypatch):
    def launch(worker, given, ranks, **how):
        assert (worker, ranks, how["deepspeed"]) == ("transfer.cli.bench_zero3.worker:measure", 1, True)
        raise RanksFailedError(f"{worker} failed on {ranks} ranks (exit status 1); see above")

    monkeypatch.setattr(bench_zero3, "launch", launch)
    assert cli.main(["bench", "zero3", *WORDS, "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("h2d bench: transfer.cli.bench_zero3.worker:measure failed on 1 ranks")


@pytest.mark.parametrize(
    ("steps", "limit", "rounds"),
    [
        (100, 11, [0, 1, 2, 3, 4]),  # a round takes 2 s: the sixth would end after 12 s
        (3, 10, [0, 1, 2, 3]),
        (100, 1, [0, 1]),  # one is measured in any case
        (4, None, [0, 1, 2, 3, 4]),
    ],
)
def test_a_limit_ends_the_measurement_with_what_fits(monkeypatch, steps, limit, rounds):
    now, begun = [0.0], []

    class Bench(zero3_worker._Bench):
        def __init__(self):
            self.options = {"steps": steps, "limit_seconds": limit}
            self.ranks = Ranks()

        def round(self, number, checked, advance):
            now[0] += 2
            begun.append((number, checked))

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    Bench().rounds(lambda _what: None)
    assert [number for number, _ in begun] == rounds
    assert [number for number, checked in begun if checked] == [0, rounds[-1]]


def test_tables_fit_into_80_columns(capsys):
    from transfer.cli.bench_zero3.report import show

    names = ("deepspeed", "no copy-back", "pinned_direct, immediate", "default", "configured")
    one = {
        "selected": "pinned_staged",
        "right_bits": False,
        "page_locked_bytes": 123 * 2**30,
        "pinned_bytes": 123 * 2**30,
        "scratch_bytes": 7,
        "memory_rise_bytes": 123 * 2**30,
        "step_seconds_by_rank": [[100.0, 200.0]],
        "forward_seconds_by_rank": [[50.0, 50.0]],
        "backward_seconds_by_rank": [[50.0, 50.0]],
        "iteration_seconds_by_rank": [[200.0, 300.0]],
    }
    hardware = {"accelerator": "cuda", "device": "", "cpu": "Acme", "cores": 1, "threads": 1, "torch": "2", "date": "x"}
    engine = {"parameters": 10**12, "sub_group_elements": [1, 2], "source_bytes": 2**30}
    measurements = list(with_figures([{**one, "variant": name} for name in names]))
    show(
        {
            "hardware": {**hardware, "deepspeed": "0.19"},
            "ranks": 2,
            "layers": 2,
            "hidden": 64,
            "optimizer": "adamw",
            "nvme": None,
            "engine": engine,
            "measurements": measurements,
            "peers": [],
            "page_lock": {"seconds": [1.0], "seconds_per_gib": 1.0},
            "not_run": [],
        }
    )
    tables = capsys.readouterr().out.partition("page-locking")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert tables.count("configured (pinned_staged)") == tables.count("pinned_direct, immediate") == 3
    assert "page-locking" not in tables
