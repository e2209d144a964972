"""Programs of a test in a process of their own."""

import atexit
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*arguments, path=(), environment=None, cwd=ROOT, timeout=120, forked=False):
    """Runs this Python with these arguments; ``path`` comes first on its module path.

    Nothing of the calling environment is passed on but the module path.

    Args:
        *arguments: As on the command line.
        path: Folders.
        environment: Variables.
        cwd: Where it runs.
        timeout: Seconds; then it is killed, and ``subprocess.TimeoutExpired`` is raised.
        forked: Forks a process that has imported torch, deepspeed and transfer, which saves two seconds. For programs
            given by ``-c`` that need a process of their own, but not an import or an environment before the imports.
    """
    variables = {"PATH": "", **(environment or {})}
    arguments = list(map(str, arguments))
    if forked:
        return _server().run(arguments, list(map(str, path)), variables, str(cwd), timeout)
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": ":".join(map(str, [*path, ROOT, *sys.path])), **variables},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_program(program, *options, **how):
    """Runs an indented text as a program."""
    return run_python(*options, "-c", textwrap.dedent(program), **how)


class ForkServer:
    """A process that forks the programs' processes, one at a time: ``forkserver.py``."""

    START_SECONDS = 120

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "forkserver.py")],
            env={"PYTHONPATH": ":".join(map(str, [ROOT, *sys.path])), "PATH": "", **self._kept()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        self._started = False

    @staticmethod
    def _kept():
        return {name: value for name, value in os.environ.items() if name == "TORCH_EXTENSIONS_DIR"}

    @property
    def is_alive(self):
        return self._process.poll() is None

    def run(self, arguments, path, environment, cwd, timeout):
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, name) for name in ("stdout", "stderr")}
            for file in files.values():
                file.touch()
            request = {
                "arguments": arguments,
                "path": path,
                "environment": {"PYTHONPATH": ":".join(map(str, [*path, ROOT, *sys.path])), **environment},
                "cwd": cwd,
                **{name: str(file) for name, file in files.items()},
            }
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            child = self._answer(timeout if self._started else self.START_SECONDS)
            self._started = True
            try:
                status = self._answer(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child, signal.SIGKILL)  # and what it has started
                self._answer(self.START_SECONDS)
                raise subprocess.TimeoutExpired(arguments, timeout, *(f.read_bytes() for f in files.values())) from None
            texts = [file.read_text() for file in files.values()]
        return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(status), *texts)

    def _answer(self, timeout):
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise subprocess.TimeoutExpired("forkserver", timeout)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server has ended with status {self._process.wait()}")
        return int(line)

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def _servers():
    """The server of this process, to be replaced when it has ended."""
    servers = []
    atexit.register(lambda: [server.close() for server in servers])
    return servers


def _server():
    servers = _servers()
    if not servers or not servers[-1].is_alive:
        servers.append(ForkServer())
    return servers[-1]


#: Of programs that end in some way with a transfer of the simulated accelerator; ``at_exit`` runs last of all.
SIMULATED_PREAMBLE = """
import atexit
at_exit = []
atexit.register(lambda: [call() for call in at_exit])
import os, sys, threading, torch
from accelerators.simulated import SimulatedAccelerator
from transfer import *
simulated = SimulatedAccelerator()
destination = simulated.device_empty(10, dtype=torch.bfloat16)
"""


def ends_quietly(done, code, stderr):
    """Checks the exit status, and that only the given error was reported."""
    assert done.returncode == code
    assert done.stderr == stderr or (stderr and done.stderr.startswith("Traceback") and done.stderr.endswith(stderr))
    assert done.stderr.count("Traceback") == bool(stderr)
