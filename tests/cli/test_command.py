"""The command itself, whatever the sub-command does."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.running import ROOT, run_program
from transfer import cli


def test_an_interrupt_is_one_line_and_its_own_exit_status(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("transfer.cli.tune.command.main", interrupted)
    assert cli.main(["tune", "--quick"]) == 130
    assert capsys.readouterr().err == "h2d tune: interrupted\n"


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
