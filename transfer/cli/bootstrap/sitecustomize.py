"""Runs at the start of every Python process below ``h2d run``, which puts this folder first on PYTHONPATH.

It waits for the import of deepspeed, which ``below_run`` serves, and lets the ``sitecustomize`` that it hides run too.
Any Python from 3.7 on may come by, also one without DeepSpeed and without the rest of this package. It is short because
it is compiled anew where Python writes no bytecode. No other file may stand here: every process could import it.
"""

import atexit
import os
import sys

TYPE_CHECKING = False  # to import `typing` takes longer than all the rest
if TYPE_CHECKING:
    from typing import Any

FOLDER = os.path.dirname(__file__)
#: The id of the process that became the command, and a random part; ``env`` where ``--print-env`` gave the variables.
RUN = os.environ.get("H2D_RUN", "")
#: Launchers that leave their ranks running when SIGTERM ends them. torchrun is none.
LAUNCHERS = ("deepspeed", "deepspeed.launcher.runner", "accelerate", "accelerate-launch", "accelerate.commands.launch")
IS_COMMAND = RUN.partition("-")[0] == str(os.getpid())
_below_run: "list[Any]" = []


class WaitForDeepSpeed:
    """Finds deepspeed alone, as the other finders do, so that ``below_run`` serves it when it has been imported."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        return below_run().find(self, path, target) if name == "deepspeed" else None


def below_run() -> "Any":
    """The module, loaded from its file: to import it from ``transfer`` would import torch."""
    if not _below_run:
        from importlib.machinery import SourceFileLoader

        file = os.path.join(os.path.dirname(FOLDER), "below_run.py")
        module = type(sys)("h2d_below_run")
        module.__file__ = file
        SourceFileLoader(module.__name__, file).exec_module(module)
        _below_run.append(module)
    return _below_run[0]


def end(process: int, ear: "Any") -> None:
    """At the end of a process, also of a fork that ends as its parent does."""
    if IS_COMMAND or "deepspeed" in sys.modules:
        below_run().last_line(os.getpid() != process, ear)


def begin() -> None:
    sys.meta_path.insert(0, WaitForDeepSpeed())
    ear = None
    if IS_COMMAND:
        import _socket

        if hasattr(_socket, "AF_UNIX"):
            ear = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
            ear.bind("\0h2d-run-" + RUN)  # the name of no file: nothing can be left behind
        program = next((each for each in getattr(sys, "orig_argv", ())[1:] if each[:1] != "-"), "")
        if os.path.basename(program) in LAUNCHERS:
            below_run().end_ranks_on_sigterm()
    atexit.register(end, os.getpid(), ear)


def run_hidden() -> None:
    """Imports the next ``sitecustomize`` of the path in this one's place; its errors reach Python."""
    here = sys.modules.pop(__name__)
    sys.path[:] = [each for each in sys.path if each != FOLDER]
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = here


try:
    begin()
except Exception as error:  # noqa: BLE001 - what runs here is not ours to end
    sys.stderr.write(f"h2d run: cannot begin: {error!r}\n")
if FOLDER in sys.path:  # else this is not the first
    run_hidden()
