"""``h2d demo``: two real trainings, and what people are told of them."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from tests.running import run_python
from transfer import cli
from transfer.cli.bench_zero3 import command as zero3_command
from transfer.cli.demo import command as demo
from transfer.cli.demo.report import show
from transfer.cli.demo.worker import elements_that_differ
from transfer.cli.measuring import cpu_adam


@pytest.mark.slow
def test_two_trainings_on_the_simulated_accelerator_agree_in_every_bit(tmp_path):
    arguments = ("--accelerator", "simulated", "--steps", 3, "--optimizer", "adamw", "--json")
    done = run_python("-m", "transfer.cli", "demo", *arguments, cwd=tmp_path, timeout=250, forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    ours, alone = report["runs"]
    assert ours["losses"] == alone["losses"]
    assert len(ours["losses"]) == len(ours["step_seconds"]) == 3
    assert ours["losses"][-1] < ours["losses"][0] - 0.5, "it learns"
    assert report["elements"] > 10**6
    assert report["elements_that_differ"] == 0
    # Both ranks copy each of their sub-groups, of which there are at most three, once a step.
    assert ours["copies"] in {2 * 3 * sub_groups for sub_groups in (1, 2, 3)}
    assert ours["copied_bytes"] >= 3 * 2 * report["elements"], "bf16, three times, with padding"
    assert "pinned_direct" in ours["strategies"]
    assert alone["copies"] == 0
    assert list(tmp_path.iterdir()) == []


def test_elements_are_counted_by_their_bits():
    found = torch.tensor([0.0, 1.0, float("nan"), 2.0], dtype=torch.bfloat16)
    expected = torch.tensor([-0.0, 1.0, float("nan"), 2.0], dtype=torch.bfloat16)
    assert elements_that_differ(found, expected) == 1, "the zeros differ, the NaNs do not"
    assert elements_that_differ(found.reshape(2, 2), expected.reshape(2, 2)) == 1
    expected[3] = 3.0
    assert elements_that_differ(found, expected) == 2


def a_report(**changed):
    run = {"losses": [7.25, 3.5], "median_step_seconds": 0.125, "copied_bytes": 2**20, "strategies": ["pinned_direct"]}
    hardware = {"device": "simulated", "cpu": "a CPU", "cores": 2, "threads": 1, "torch": "t", "deepspeed": "d"}
    return {
        "hardware": {**hardware, "date": "2026-01-01"},
        "accelerator": "simulated",
        "ranks": 2,
        "runs": [{"name": "ours", "copies": 12, **run}, {"name": "alone", "copies": 0, **run}],
        "elements": 1000,
        "elements_that_differ": 0,
        **changed,
    }


def test_the_table_fits_into_80_columns_and_says_what_it_means(capsys):
    show(a_report())
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith(("ours", "alone", "run"))]
    assert [line.split() for line in table[1:]] == [
        ["ours", "7.250", "3.500", "0.125", "12", "0"],
        ["alone", "7.250", "3.500", "0.125", "-", "-"],
    ]
    assert max(map(len, table)) <= 80
    assert "All 1,000 elements are the same, bit for bit" in out
    assert out.startswith("The accelerator is simulated: this tests bits, not speed.\n")


@pytest.mark.parametrize(("differing", "copies", "status"), [(0, 12, 0), (3, 12, 1), (0, 0, 1)])
def test_the_exit_status_says_whether_the_bits_agree(monkeypatch, capsys, differing, copies, status):
    report = a_report(elements_that_differ=differing)
    report["runs"][0]["copies"] = copies
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(demo, "launch", lambda *given, **how: report)
    assert cli.main(["demo", "--accelerator", "simulated", "--optimizer", "adamw"]) == status
    out = capsys.readouterr().out
    assert ("WRONG: 3 of 1,000 elements" in out) == (differing == 3)
    assert ("No copy went through this package" in out) == (copies == 0)


def test_a_wrong_name_is_told_with_the_nearest_and_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--accelerator", "simulatd"])
    assert ended.value.code == 2
    assert "'simulated'" in capsys.readouterr().err


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "cpu_adam"


def test_without_a_compiler_the_reason_is_one_sentence_and_nothing_starts(environment, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    said = []
    assert cpu_adam.compile_once(said.append) == (
        "There is no C++ compiler here (c++ is not on PATH), and DeepSpeed's CPU Adam needs one."
    )
    assert said == []
    assert not environment.exists()


def test_the_demo_then_says_what_it_takes_instead(environment, monkeypatch, capsys):
    monkeypatch.setattr(cpu_adam, "compile_once", lambda say: "No luck.")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    given = []
    monkeypatch.setattr(demo, "launch", lambda worker, options, *rest, **how: given.append(options) or a_report())
    assert cli.main(["demo", "--accelerator", "simulated"]) == 0
    assert given[0]["optimizer"] == "adamw"
    assert "No luck. torch's AdamW updates the weights" in capsys.readouterr().err
    assert cli.main(["demo", "--accelerator", "simulated", "--optimizer", "cpu_adam"]) == 1
    assert capsys.readouterr().err == "h2d demo: No luck.\n"


@pytest.mark.slow
def test_a_lock_that_a_killed_compiler_left_is_not_waited_for(environment):
    environment.mkdir()
    (environment / "lock").touch()
    began = time.monotonic()
    reason = cpu_adam.compile_once(lambda sentence: pytest.fail(sentence))
    assert str(environment / "lock") in reason
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_a_compiler_that_works_is_waited_for_and_told_of(environment):
    """Nothing but a process that works in the folder, and takes the lock away after two seconds."""
    environment.mkdir()
    (environment / "lock").touch()
    (environment / "cpu_adam.so").touch()
    program = "import os, time; time.sleep(2.5); os.unlink('lock')"
    with subprocess.Popen([sys.executable, "-c", program], cwd=environment) as compiler:
        said = []
        assert cpu_adam.compile_once(said.append) is None
        assert not (environment / "lock").exists()
    assert compiler.returncode == 0
    assert said == [f"Another process compiles CPU Adam in {environment}: this one waits, half an hour at most."]


@pytest.mark.slow
def test_the_benchmark_of_steps_ends_where_a_lock_was_left(environment, monkeypatch, capsys):
    environment.mkdir()
    (environment / "lock").touch()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the command puts ninja's folder before it
    monkeypatch.setattr(zero3_command, "launch", lambda *_, **__: pytest.fail("ranks would wait for ever"))
    assert cli.main(["bench", "zero3", "--accelerator", "simulated"]) == 1
    told = capsys.readouterr().err
    assert f"delete {environment / 'lock'}" in told
    assert "--optimizer adamw" in told


def test_what_is_compiled_is_used_and_a_failing_compiler_is_quoted(environment, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)  # anything that is there
    said = []

    def failing(command, **how):
        assert said, "the compile step says that it starts"
        assert how["env"]["TORCH_EXTENSIONS_DIR"] == str(environment.parent)
        return subprocess.CompletedProcess(command, 1, "", "much\nfatal error: Python.h: No such file\n")

    monkeypatch.setattr(subprocess, "run", failing)
    assert "fatal error: Python.h: No such file" in cpu_adam.compile_once(said.append)
    environment.mkdir()
    (environment / "cpu_adam.so").touch()
    assert cpu_adam.compile_once(lambda sentence: pytest.fail(sentence)) is None


def test_each_version_has_a_directory_of_its_own_in_the_environment(monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    directory = cpu_adam.extensions_directory()
    assert directory.is_relative_to(sys.prefix)
    assert torch.__version__ in directory.name
