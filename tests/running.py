"""Programs of a test in a process of their own."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*arguments, path=(), environment=None, cwd=ROOT, timeout=120):
    """Runs this Python with these arguments; ``path`` comes first on its module path.

    Nothing of the calling environment is passed on but the module path.
    """
    modules = ":".join(map(str, [*path, ROOT, *sys.path]))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={"PYTHONPATH": modules, "PATH": "", **(environment or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_program(program, *options, **how):
    """Runs an indented text as a program."""
    return run_python(*options, "-c", textwrap.dedent(program), **how)


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
