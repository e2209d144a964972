"""``h2d run``: what a script sees, and what reaches the shell."""

import sys

import pytest

from tests.running import run_python
from transfer import cli

SCRIPT = """
import sys
from deepspeed.runtime.engine import DeepSpeedEngine
print([__name__, sys.argv, hasattr(DeepSpeedEngine._configure_zero_optimizer, "__wrapped__")])
import beside
sys.exit(3)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("print('found beside the script')")
    return path


def seen(done):
    assert "found beside the script" in done.stdout, done.stderr
    return eval(next(line for line in done.stdout.splitlines() if line.startswith("['__main__'")))  # a list of ours


def test_the_script_runs_as_main_with_its_own_arguments_and_every_engine_attached(script):
    done = run_python("-m", "transfer.cli", "run", str(script), "--lr", "1e-4", "-v")
    assert done.returncode == 3
    assert seen(done) == ["__main__", [str(script), "--lr", "1e-4", "-v"], True]


def test_deepspeeds_launcher_puts_its_option_in_front(script):
    done = run_python("-m", "transfer.cli", "--local_rank=1", "run", str(script), "--lr", "1e-4", forked=True)
    assert seen(done)[1] == [str(script), "--local_rank=1", "--lr", "1e-4"]


def test_a_module(script):
    done = run_python("-m", "transfer.cli", "run", "-m", "train", "x", cwd=script.parent, forked=True)
    assert done.returncode == 3
    assert seen(done)[1][1:] == ["x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py' here"),
        ([], "the following arguments are required: script"),
        (["-m", "nowhere"], "there is no module 'nowhere'"),
        (["--config", "nowhere.yaml", "SCRIPT"], "nowhere.yaml"),
        (["--config", "BAD", "SCRIPT"], "Did you mean 'strategy'?"),
    ],
)
def test_mistakes_are_told_before_the_script_begins(script, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (script.parent / "bad.yaml").write_text("transfer: {strategi: pageable}")
    names = {"SCRIPT": str(script), "BAD": str(script.parent / "bad.yaml")}
    try:
        status = cli.main(["run", *(names.get(each, each) for each in arguments)])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err
    assert "__main__" not in printed.out
