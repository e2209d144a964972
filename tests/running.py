"""Programs of a test in a process of their own."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

from tests.environment import NO_COMPILER

ROOT = Path(__file__).parents[1]


def run_python(
    *arguments, path=(), environment=None, cwd=ROOT, timeout=120, forked=False, tear_down=True, prepared=None
):
    """Runs this Python with these arguments; ``path`` comes first on its module path.

    Nothing of the calling environment is passed on but the module path.

    Args:
        *arguments: As on the command line.
        path: Folders.
        environment: Variables.
        cwd: Where it runs.
        timeout: Seconds; then it is killed, and ``subprocess.TimeoutExpired`` is raised.
        forked: Forks a process that has imported torch, deepspeed and transfer, which saves two seconds. For ``-c`` and
            ``-m`` where a process of its own is needed, but not an import or an environment before the imports. What
            is killed after the timeout includes what it has started.
        tear_down: False: a forked process ends without the half second in which Python is torn down, after its threads
            and all that ``atexit`` calls.
        prepared: The name of a module that the process to fork has imported too.

    Returns:
        A ``subprocess.CompletedProcess`` with the exit status and the text of both outputs.
    """
    variables = {"PYTHONPATH": ":".join(map(str, [*path, ROOT, *sys.path])), "PATH": "", **NO_COMPILER}
    variables.update(environment or {})
    arguments = list(map(str, arguments))
    if forked:
        request = {"arguments": arguments, "path": list(map(str, path)), "environment": variables, "cwd": str(cwd)}
        return _server(prepared).run({**request, "tear_down": tear_down}, timeout)
    return subprocess.run(
        [sys.executable, *arguments],
        env=variables,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_program(program, *arguments, forked=True, tear_down=False, **how):
    """Runs an indented text in which warnings are errors, with these ``sys.argv[1:]``, as ``run_python`` does.

    A forked one has the list ``at_exit``: what it appends is called after all that the packages do at the end.
    """
    command = ("-W", "error", "-c", textwrap.dedent(program), *arguments)
    return run_python(*command, forked=forked, tear_down=tear_down, **how)


def run_threads(work, arguments, seconds=60):
    """Calls ``work`` with each argument at once, each in a thread of its own; all must end in time."""
    threads = [threading.Thread(target=work, args=(argument,), daemon=True) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads)


class _Server:
    """A process that forks the programs' processes, one at a time: ``forkserver.py``."""

    START_SECONDS = 120

    def __init__(self, prepared):
        # One thread: others do not survive a fork.
        environment = {"PATH": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if prepared is not None:
            environment |= {"PATH": os.environ["PATH"], **NO_COMPILER}
        if "TORCH_EXTENSIONS_DIR" in os.environ:
            environment["TORCH_EXTENSIONS_DIR"] = os.environ["TORCH_EXTENSIONS_DIR"]
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "forkserver.py"), *([] if prepared is None else [prepared])],
            env={"PYTHONPATH": ":".join(map(str, [ROOT, *sys.path])), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # else two answers may be read at once, and the second is waited for
            cwd=ROOT,
        )
        atexit.register(self.close)
        self._answer(self.START_SECONDS)

    @property
    def is_alive(self):
        return self._process.poll() is None

    def run(self, request, timeout):
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, name) for name in ("stdout", "stderr")}
            for file in files.values():
                file.touch()
            request |= {name: str(file) for name, file in files.items()}
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            child = self._answer(self.START_SECONDS)
            try:
                status = self._answer(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child, signal.SIGKILL)  # and what it has started
                self._answer(self.START_SECONDS)
                outputs = [file.read_bytes() for file in files.values()]
                raise subprocess.TimeoutExpired(request["arguments"], timeout, *outputs) from None
            texts = [file.read_text() for file in files.values()]
        return subprocess.CompletedProcess(request["arguments"], os.waitstatus_to_exitcode(status), *texts)

    def _answer(self, timeout):
        if not select.select([self._process.stdout.fileno()], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("forkserver.py", timeout)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server has ended with status {self._process.wait()}")
        return int(line)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


_servers = {}


def _server(prepared):
    """The server of this process that has imported this module too; another one when it has ended."""
    if prepared not in _servers or not _servers[prepared].is_alive:
        _servers[prepared] = _Server(prepared)
    return _servers[prepared]


#: Of programs that end in some way with a transfer of the simulated accelerator.
SIMULATED_PREAMBLE = """
import os, sys, threading, torch
from accelerators.simulated import SimulatedAccelerator
from transfer import *
simulated = SimulatedAccelerator()
destination = simulated.device_empty(10, dtype=torch.bfloat16)
"""


def succeeds(done, stdout="", stderr=""):
    """Checks that a program has ended well, and all that it has written."""
    assert (done.returncode, done.stdout, done.stderr) == (0, stdout, stderr)


def ends_quietly(done, code, stderr):
    """Checks the exit status, and that only the given error was reported."""
    assert done.returncode == code
    assert done.stderr == stderr or (stderr and done.stderr.startswith("Traceback") and done.stderr.endswith(stderr))
    assert done.stderr.count("Traceback") == bool(stderr)
