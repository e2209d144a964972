"""Programs in processes of their own, without an import for each: forks of one Python that has imported everything.

A program runs as if it were given to ``python -W error -c``, with its exit status, its ``atexit`` calls and its
threads. Only a program that looks at the import itself needs ``run_python``. What it appends to ``at_exit`` is called
after all that the packages do at the end of the process.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_forked(program, *arguments, timeout=60, tear_down=False):
    """Runs an indented text as a program.

    Args:
        program: The text.
        arguments: Its ``sys.argv[1:]``.
        timeout: Seconds, after which it is killed.
        tear_down: Whether Python is torn down at the end, which takes half a second.

    Returns:
        A ``subprocess.CompletedProcess`` with the exit status and the text of both outputs.
    """
    job = {
        "program": textwrap.dedent(program),
        "arguments": [*map(str, arguments)],
        "timeout": timeout,
        "tear_down": tear_down,
    }
    with tempfile.TemporaryDirectory() as folder:
        status = _server().run({**job, "folder": folder})
        out, err = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
    if status == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(program, timeout, out, err)
    return subprocess.CompletedProcess(program, status, out, err)


class _Server:
    def __init__(self):
        modules = ":".join(map(str, [ROOT, *sys.path]))
        # One thread: others do not survive a fork.
        environment = {"PYTHONPATH": modules, "PATH": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.fork_server"],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.end)

    def run(self, job):
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        # The alarm ends the program; this is for one that has switched it off. The first import takes its time.
        if not select.select([self._process.stdout], [], [], job["timeout"] + 120)[0]:
            self.end()
            _server.cache_clear()
            raise subprocess.TimeoutExpired(job["program"], job["timeout"])
        return int(self._process.stdout.readline())

    def end(self):
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@functools.cache
def _server():
    return _Server()


def _serve():
    """In the server: forks for each line; returns the job in the child, and None at the end."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return None


def _become(job):
    """In the child: what a new process would be given."""
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{job['folder']}/stdout", os.O_WRONLY | os.O_CREAT),
        (2, f"{job['folder']}/stderr", os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = ["-c", *job["arguments"]]
    signal.alarm(job["timeout"])


def _run(job):
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.at_exit = _at_exit
    code = compile(job["program"], "<program>", "exec")
    if job["tear_down"]:
        exec(code, main.__dict__)
        return
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001 - as at the end of a Python
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    _at_exit = []
    atexit.register(lambda: [call() for call in _at_exit])

    import transfer.nvme  # noqa: F401

    gc.freeze()  # no fork looks at, and so copies, what was there before it
    _job = _serve()
    if _job is not None:
        _become(_job)
        _run(_job)
