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
