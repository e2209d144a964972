"""``h2d run``: what a script sees, and what reaches the shell."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, run_program, run_python
from transfer import cli

pytestmark = pytest.mark.slow

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


@pytest.mark.slow
def test_the_script_runs_as_main_with_its_own_arguments_and_every_engine_attached(script):
    done = run_python("-m", "transfer.cli", "run", str(script), "--lr", "1e-4", "-v", forked=True)
    assert done.returncode == 3
    assert seen(done) == ["__main__", [str(script), "--lr", "1e-4", "-v"], True]


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


SHOW = """
import os, sys
names = ("H2D_CONFIG", "H2D_RUN", "PYTHONPATH")
print([os.getpid(), sys.argv, sys.path[0], sys.flags.optimize, sys.warnoptions, *map(os.environ.get, names)])
"""


def shown(done):
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


@pytest.fixture
def show(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path / "show.py"


def test_the_program_takes_the_place_of_the_command(show):
    program = f"""
    import os
    from transfer.cli import main
    print(os.getpid(), flush=True)
    main(["run", {str(show)!r}])
    """
    done = run_program(program)
    first, rest = done.stdout.split("\n", maxsplit=1)
    process, argv, folder, optimize, warnings, config, run, path = eval(rest)
    assert process == int(first)
    assert (argv, folder, optimize, config) == ([str(show)], str(show.parent), sys.flags.optimize, None)
    assert warnings == ["error"], "Python's options are kept"
    assert run.startswith(f"{process}-")
    assert path.endswith(":" + ":".join(sys.path))


def test_deepspeeds_launcher_puts_its_option_in_front(show):
    done = run_python("-m", "transfer.cli", "--local_rank=1", "run", show, "--lr", "1e-4", forked=True)
    assert shown(done)[1] == [str(show), "--local_rank=1", "--lr", "1e-4"]


def test_a_module(show):
    done = run_python("-m", "transfer.cli", "run", "-m", "show", "x", cwd=show.parent, forked=True)
    assert shown(done)[1:3] == [[str(show), "x"], str(show.parent)]


def test_a_signal_ends_the_script_itself(tmp_path):
    (tmp_path / "killed.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert run_python("-m", "transfer.cli", "run", tmp_path / "killed.py", forked=True).returncode == -15


@pytest.mark.parametrize("given", ["argument", "environment", "both"])
def test_processes_below_find_the_configuration_wherever_they_run(show, given):
    (show.parent / "ours.yaml").write_text("transfer: {}")
    (show.parent / "other.yaml").write_text("transfer: {strategy: pageable}")
    option = [] if given == "environment" else ["--config", "ours.yaml"]
    variable = {"argument": {}, "environment": {"H2D_CONFIG": "ours.yaml"}, "both": {"H2D_CONFIG": "other.yaml"}}[given]
    command = ("-m", "transfer.cli", "run", *option, "show.py")
    done = run_python(*command, cwd=show.parent, environment=variable, forked=True)
    assert shown(done)[5] == str(show.parent / "ours.yaml")


def test_a_command_is_found_on_the_path(show):
    environment = {"PATH": os.environ["PATH"]}
    command = ("sh", "-c", f"exec {shlex.quote(sys.executable)} show.py $0", "one")
    done = run_python("-m", "transfer.cli", "run", *command, cwd=show.parent, environment=environment, forked=True)
    assert shown(done)[1] == ["show.py", "one"]


@pytest.mark.parametrize(
    ("before", "command"),
    [
        (["-S"], ["SCRIPT"]),
        ([], ["python3", "-I", "SCRIPT"]),
        ([], ["python3", "-Wignore", "-uE", "SCRIPT"]),
    ],
)
def test_options_of_python_that_switch_it_off_are_refused(show, before, command):
    command = [str(show) if each == "SCRIPT" else each for each in command]
    done = run_python(
        *(*before, "-m", "transfer.cli", "run", *command), environment={"PATH": os.environ["PATH"]}, forked=not before
    )
    assert done.returncode == 2
    assert "Python's options -I, -E and -S" in done.stderr
    assert done.stdout == ""


def test_options_of_python_that_only_look_like_them_are_passed_on(show):
    environment = {"PATH": os.environ["PATH"]}
    command = ("python3", "-WIgnore::UserWarning", "show.py", "-I")
    done = run_python("-m", "transfer.cli", "run", *command, cwd=show.parent, environment=environment, forked=True)
    assert shown(done)[1] == ["show.py", "-I"]


def test_the_exports_are_for_a_shell_and_for_any_number_of_times(show):
    folder = show.parent / "it's here"
    folder.mkdir()
    (folder / "h2d.yaml").write_text("transfer: {}")
    printed = run_python(
        *("-m", "transfer.cli", "run", "--print-env", "--config", "h2d.yaml"),
        cwd=folder,
        environment={"PYTHONPATH": "/one::/two"},
        forked=True,
    )
    assert printed.returncode == 0, printed.stderr
    seen = subprocess.run(
        ["sh", "-c", f"{printed.stdout}\n{shlex.quote(sys.executable)} {shlex.quote(str(show))}"],
        env={"PYTHONPATH": "/one::/two"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    config, run, path = shown(seen)[5:]
    assert config == str(folder / "h2d.yaml")
    assert run == "env"
    first, *rest = path.split(":")
    assert rest == ["/one", "", "/two"]
    assert Path(first, "sitecustomize.py").is_file()
    assert len(list(Path(first).glob("*.py"))) == 1, "what stands there can be imported by every process"
    again = run_python("-m", "transfer.cli", "run", "--print-env", environment={"PYTHONPATH": path}, forked=True)
    assert f"export PYTHONPATH={path}\n" in again.stdout


@pytest.mark.parametrize(("outer", "kept"), [("12-ab", True), ("env", False)])
def test_below_another_one_that_one_is_told_of_engines(show, outer, kept):
    bootstrap = Path(cli.__file__).with_name("bootstrap")
    environment = {"H2D_RUN": outer, "PYTHONPATH": f"{ROOT}:{bootstrap}:{ROOT}"}
    done = run_python("-m", "transfer.cli", "run", show, environment=environment, forked=True)
    run, path = shown(done)[6:]
    assert (run == outer) == kept
    assert path == f"{bootstrap}:{ROOT}:{ROOT}"


def test_a_command_that_the_system_cannot_start(tmp_path):
    (tmp_path / "strange").write_text("neither a program nor a script that says by what it is run")
    (tmp_path / "strange").chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    done = run_python("-m", "transfer.cli", "run", "strange", environment=environment, forked=True)
    assert done.returncode == 126
    assert done.stderr == f"h2d run: {tmp_path}/strange cannot be started: Exec format error\n"
