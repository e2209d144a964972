"""A forked process of a test: what it has in common with a new Python, and that nothing of it reaches the next."""

import subprocess
import time

import pytest

from tests.running import run_program, run_python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("forked", [False, True])
def test_what_a_program_sees(tmp_path, forked):
    program = """if True:
        import os, sys, warnings
        print(sorted(name for name in os.environ if name in ("X", "HOME", "PATH")), os.environ["X"], sys.argv)
        print(os.path.samefile(".", sys.argv[1]), __name__, sys.stdin.read() == "")
        print("to stderr", file=sys.stderr)
        try:
            warnings.warn("this")
        except UserWarning:
            print("raised")
        from beside import value
        print(value, "x" * 2**20)
        sys.exit(3)
    """
    (tmp_path / "beside.py").write_text("value = 7")
    arguments = ["-W", "error", "-c", program, tmp_path]
    done = run_python(*arguments, environment={"X": "1"}, cwd=tmp_path, path=[tmp_path], forked=forked)
    assert done.stdout.splitlines() == [
        f"['PATH', 'X'] 1 ['-c', '{tmp_path}']",
        "True __main__ True",
        "raised",
        "7 " + "x" * 2**20,
    ]
    assert done.stderr == "to stderr\n"
    assert done.returncode == 3


@pytest.mark.parametrize(
    "how",
    [{"forked": False}, {"forked": True}, {"forked": True, "tear_down": True}],
    ids=["new", "forked", "forked and torn down"],
)
@pytest.mark.parametrize(
    ("program", "code", "stdout", "stderr"),
    [
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        ("raise KeyError('x')", 1, "", "KeyError: 'x'\n"),
        ("import sys; sys.exit('why')", 1, "", "why\n"),
        ("import os; os.abort()", -6, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "", ""),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('thread'))).start()",
            0,
            "thread\n",
            "",
        ),
    ],
    ids=["atexit", "error", "text", "abort", "kill", "thread"],
)
def test_how_a_program_ends(program, code, stdout, stderr, how):
    done = run_program(program, **how)
    assert done.returncode == code
    assert done.stdout == stdout
    assert done.stderr.endswith(stderr)
    assert bool(done.stderr) == bool(stderr)


def test_a_module(tmp_path):
    (tmp_path / "beside.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(3)")
    done = run_python("-m", "beside", "x", path=[tmp_path], forked=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "__main__ ['x']\n", "")


@pytest.mark.parametrize("tear_down", [False, True])
def test_what_is_called_at_the_end_is_called_after_all_that_packages_do_there(tear_down):
    program = """
        import atexit, torch
        from accelerators.simulated import SimulatedAccelerator
        from transfer import PinnedStagedTransfer
        simulated = SimulatedAccelerator()
        at_exit.append(lambda: print(simulated.pinned_bytes))
        atexit.register(lambda: print(simulated.pinned_bytes))
        destination = simulated.device_empty(10, dtype=torch.bfloat16)
        transfer = PinnedStagedTransfer(accelerator=simulated, chunk_elements=3)
        transfer.copy(destination, torch.ones(10))
    """
    done = run_program(program, tear_down=tear_down)
    assert (done.returncode, done.stdout, done.stderr) == (0, "12\n0\n", "")


@pytest.mark.slow
def test_a_program_that_hangs_is_killed_with_what_it_has_started(tmp_path):
    witness = tmp_path / "witness"
    program = f"""
        import os, sys, time
        if os.fork() == 0:
            while True:
                with open({str(witness)!r}, "a") as file:
                    file.write("x")
                time.sleep(0.01)
        print("before", flush=True)
        time.sleep(600)
    """
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_program(program, timeout=1)
    assert caught.value.output == b"before\n"
    time.sleep(0.1)
    written = witness.stat().st_size
    time.sleep(0.2)
    assert witness.stat().st_size == written > 0
    assert run_program("print(1)").stdout == "1\n"


def test_nothing_of_a_program_reaches_the_next():
    program = """
        import os, sys, torch, transfer
        print(os.environ.get("LEFT"), hasattr(torch, "left"), torch.rand(1).item(), transfer.strategy_names())
        os.environ["LEFT"], torch.left = "1", True
        transfer.register_strategy("left", transfer.PageableTransfer)
    """
    first, second = (run_program(program) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert "None False" in first.stdout


@pytest.mark.slow
def test_a_server_that_was_killed_is_replaced():
    with pytest.raises(RuntimeError, match="fork server has ended with status -9"):
        run_program("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert run_program("print(1)").stdout == "1\n"
