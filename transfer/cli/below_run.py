"""What ``h2d run`` does in a process below it, beyond waiting for deepspeed: loaded by ``bootstrap/sitecustomize.py``.

It is loaded from its file and imports nothing of this package until deepspeed is there: the process may be a
launcher's, or have another Python.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # to import `typing` takes longer than all the rest
if TYPE_CHECKING:
    from typing import Any

#: The folder of the package ``transfer``.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def find(finder: Any, path: Any, target: Any) -> Any:
    """What the finders but ``finder`` find for deepspeed, with ``serve`` called at the end of its import."""
    finders = [each for each in sys.meta_path if each is not finder and hasattr(each, "find_spec")]
    specs = (each.find_spec("deepspeed", path, target) for each in finders)
    spec: Any = next((each for each in specs if each is not None), None)
    load = getattr(spec and spec.loader, "exec_module", None)
    if load is None:  # not found; or a mere folder of this name
        return spec

    def exec_module(module: Any) -> None:
        del spec.loader.exec_module
        load(module)
        serve(module)

    spec.loader.exec_module = exec_module  # of this one loader, which the module keeps
    return spec


def serve(deepspeed: Any) -> None:
    """Installs the interface. Where that fails, it says so, and DeepSpeed makes no engine in this process.

    The import succeeds all the same: not every process that imports deepspeed trains.
    """
    if not os.environ.get("H2D_RUN"):
        _say("PYTHONPATH has reached this process, H2D_RUN has not: let the launcher pass H2D_RUN and H2D_CONFIG on")
    if ROOT not in sys.path:
        sys.path.append(ROOT)
    try:
        from transfer import zero3
        from transfer.zero3 import summary

        zero3.install()
        summary.speak(_say, _tell_command)
        if os.environ.get("H2D_COMPARE"):
            from transfer.cli import comparing

            comparing.begin(_say)
    except Exception as error:  # noqa: BLE001 - it is raised where an engine is asked for
        reason, cause = "ZeRO-3 cannot be served: " + "; ".join(str(error).splitlines()), error
        _say(reason)

        def initialize(*_: Any, **__: Any) -> Any:
            raise RuntimeError("h2d run: " + reason) from cause

        deepspeed.initialize = initialize


def last_line(is_fork: bool, ear: Any) -> None:
    """Says at the end of a process what was served, or that there was nothing to serve.

    Args:
        is_fork: Whether another process began with the bootstrap, and this is a fork of it.
        ear: The socket of the process that became the command, or None.
    """
    summary = sys.modules.get("transfer.zero3.summary")
    if (summary is not None and summary.end()) or is_fork:
        return
    run, has_deepspeed = os.environ.get("H2D_RUN", ""), "deepspeed" in sys.modules
    if ear is not None:
        is_over = not _is_told(ear)
    elif run.partition("-")[0] == str(os.getpid()):
        is_over = has_deepspeed
    else:  # there may be no command: the process of the first rank speaks, and none of its helpers
        helpers: Any = sys.modules.get("multiprocessing.process")
        is_helper = helpers is not None and helpers.parent_process() is not None
        is_over = run == "env" and has_deepspeed and os.environ.get("RANK") == "0" and not is_helper
    if is_over:
        _say("no ZeRO-3 engine was made")


def end_ranks_on_sigterm() -> None:
    """Lets a launcher that would leave its ranks running pass SIGTERM on; it then ends as they do."""
    import signal

    process = os.getpid()

    def pass_on(number: int, _: Any) -> None:
        import psutil  # type: ignore[import-untyped]  # which these launchers need

        children = psutil.Process().children()
        if not children or os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        for child in children:
            child.terminate()

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, pass_on)


def _say(line: str) -> None:
    """Writes a line for people. One rank speaks."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
        sys.stderr.write(f"h2d run: {line}\n")
        sys.stderr.flush()


def _tell_command() -> None:
    """Tells the process that became the command that a process below it has an engine."""
    import contextlib
    import socket

    with contextlib.suppress(AttributeError, OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.setblocking(False)  # it may have been told often enough
        mouth.sendto(b"engine", "\0h2d-run-" + os.environ.get("H2D_RUN", ""))


def _is_told(ear: Any) -> bool:
    ear.setblocking(False)
    try:
        return bool(ear.recv(16))
    except OSError:
        return False
