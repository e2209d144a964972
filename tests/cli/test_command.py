"""The command itself, whatever the sub-command does."""

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.running import ROOT, run_program
from transfer import cli
from transfer.cli.completion import SHELLS, whole_parser


def test_an_interrupt_is_one_line_and_its_own_exit_status(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("transfer.cli.tune.command.main", interrupted)
    assert cli.main(["tune", "--quick"]) == 130
    assert capsys.readouterr().err == "h2d tune: interrupted\n"


def test_an_interrupt_is_one_line_wherever_it_falls(tmp_path):
    """In an import, in one that makes another error of it, and in a finalizer, where Python drops it."""
    modules = {
        "imported": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "converted": """
            import os, signal
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as interrupt:
                raise ImportError("numpy._core failed to import") from interrupt
            """,
        "dropped": """
            import os, signal, time
            class Ended:
                def __del__(self):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.01)
            Ended()
            time.sleep(60)
            """,
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    program = f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from transfer import cli
        for name in {list(modules)!r}:
            cli.COMMANDS[name] = (name, "a command")
            sys.argv = ["h2d", name]
            assert cli.main() == 130
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "the rest of the process ends without a word"
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as below nohup
        sys.argv = ["h2d", "--version"]
        cli.main()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        """
    done = run_program(program, path=[tmp_path], timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"h2d {name}: interrupted" for name in modules]


def leaves(parser):
    """Each parser of a command, with its name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield name, each
                yield from leaves(each)


def test_every_command_helps_in_lines_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    forms = [["--help"], *([name, "--help"] for name in cli.COMMANDS), ["bench", "zero3", "--help"], []]
    for form in forms:
        try:
            status = cli.main(form)
        except SystemExit as ended:
            status = ended.code
        out, err = capsys.readouterr()
        assert (status, err) == (0, ""), form
        assert "usage: h2d" in out
        assert [line for line in out.splitlines() if len(line) > 80] == [], form
    assert all(f"\n  {name} " in out for name in cli.COMMANDS), "the last form is the help of the whole"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["bnch"], "h2d: unknown command 'bnch'; did you mean 'bench'?"),
        (["--hlp"], "h2d: unknown option '--hlp'; did you mean '--help'?"),
        (["xyzzy"], "h2d: unknown command 'xyzzy'"),
        (["bench", "--elemnts", "5"], "h2d bench: unrecognized arguments: --elemnts 5; did you mean '--elements'?"),
        (["bench", "zero"], "h2d bench: unknown form 'zero'; did you mean 'zero3'?"),
        (["tune", "--nvmee=x"], "h2d tune: unrecognized arguments: --nvmee=x; did you mean '--nvme'?"),
        (["completion", "bsh"], "did you mean 'bash'?"),
        (["run"], "h2d run: the following arguments are required: script"),
    ],
)
def test_a_mistake_is_one_line_with_what_was_meant_and_one_that_points_to_help(capsys, given, message):
    try:
        status = cli.main(given)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    first, second = err.splitlines()
    assert first.endswith(message) or first == message
    assert second.startswith("`h2d ")
    assert "--help` lists the " in second


def test_every_report_as_json_has_a_version():
    """Of its form; `schema` prints one that others define."""
    reporting = set()
    for name, (module, _) in cli.COMMANDS.items():
        made = importlib.import_module(module).make_parser()
        if any("--json" in action.option_strings for action in made._actions):
            reporting.add(name)
            home = "transfer.cli.comparing.report" if name == "run" else module  # of `h2d run --compare`
            assert importlib.import_module(home).SCHEMA_VERSION >= 1
    assert {"doctor", "demo", "explain", "validate", "bench", "tune"} <= reporting


def test_help_mistakes_and_completion_load_no_torch(tmp_path):
    """What takes a second is torch and what needs it: so it is what is loaded that is tested, and not a clock."""
    program = """
        import contextlib, io, sys
        from transfer import cli

        forms = [["--help"], ["--version"], ["bnch"], ["completion", "bash"], ["run", "no-such-script.py"]]
        forms += [[name, "--help"] for name in cli.COMMANDS] + [["bench", "zero3", "--help"], ["bench", "--bogus"]]
        for form in forms:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    cli.main(form)
                except SystemExit:
                    pass
            heavy = {"torch", "deepspeed", "pydantic", "numpy", "rich", "matplotlib"} & set(sys.modules)
            assert not heavy, (form, heavy)
        """
    done = run_program(program, forked=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shell", list(SHELLS))
def test_completion_knows_every_command_and_option(capsys, shell):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, parser in leaves(whole_parser()):
        assert name in script
        for option in (option for action in parser._actions for option in action.option_strings):
            assert option.lstrip("-") in script, (name, option)


def test_a_shell_completes(capsys, tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("There is no bash here.")
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "h2d.bash").write_text(capsys.readouterr().out)
    (tmp_path / "my.yaml").touch()
    asked = {"h2d ben": "bench", "h2d bench zero3 --peer": "--peers", "h2d run --config my.y": "my.yaml"}
    asked["h2d demo --accelerator simu"] = "simulated"
    lines = ["source ./h2d.bash"]
    for line in asked:
        words = line.split()
        lines.append(f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_h2d; echo ${{COMPREPLY[@]}}")
    done = subprocess.run(
        [bash, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == list(asked.values()), done.stderr


@pytest.mark.slow
def test_an_interrupted_command_ends_its_ranks(tmp_path):
    """All of them, although a terminal interrupts the command and what shares its session; they print nothing."""
    worker = tmp_path / "sleeper.py"
    worker.write_text(
        "import os, pathlib, time\n"
        "def run(options, ranks):\n"
        "    pathlib.Path(options['pids'], str(os.getpid())).touch()\n"
        "    time.sleep(100)\n"
    )
    program = (
        # Python leaves the signal ignored where its parent ignores it, as nohup does.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import transfer.cli.measuring.ranks as ranks\n"
        f"ranks.launch('sleeper:run', {{'pids': {str(tmp_path / 'pids')!r}, 'accelerator': 'cpu'}}, 2, threads=1)\n"
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join([str(tmp_path), str(ROOT), *sys.path]), "PATH": ""},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while len(list(pids.iterdir())) < 2:
            assert time.monotonic() < deadline
            assert started.poll() is None, started.stderr.read()
            time.sleep(0.1)
        os.killpg(started.pid, signal.SIGINT)
        _, error = started.communicate(timeout=120)
        assert error.endswith(b"KeyboardInterrupt\n")
        assert error.count(b"Traceback") == 1, "the command's own"
    finally:
        started.kill()
    for path in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            for _ in range(100):
                os.kill(int(path.name), 0)
                time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("raise SystemExit(3)", "ended with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_told(tmp_path, end, how):
    (tmp_path / "failing.py").write_text(
        "import os, pathlib, signal, time\n"
        "def run(options, ranks):\n"
        "    pathlib.Path(options['pids'], str(os.getpid())).touch()\n"
        "    ranks.barrier()\n"
        "    if ranks.rank == 1:\n"
        f"        {end}\n"
        "    time.sleep(100)\n"
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    options = {"pids": str(pids), "accelerator": "cpu"}
    program = f"""
        from transfer.cli.measuring.ranks import RanksFailedError, launch

        try:
            launch("failing:run", {options!r}, 2, threads=1)
        except RanksFailedError as error:
            print(error)
        """
    done = run_program(program, path=[tmp_path], timeout=90)
    assert done.stdout == f"failing:run failed on 2 ranks (one {how}); see above\n", done.stderr[-4000:]
    assert len(list(pids.iterdir())) == 2
    for path in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)
