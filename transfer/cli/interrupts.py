"""Ctrl-C is one line and status 130, wherever it falls: also in imports, in finalizers, and while Python ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

STATUS = 130

#: When an interrupt that Python has dropped comes again.
_AGAIN_SECONDS = 0.01

_came = False


def came() -> bool:
    """Whether there was a Ctrl-C. What an import makes of one may be any exception."""
    return _came


def watch() -> None:
    """Begins to notice Ctrl-C, in a process that is a command. Where it is ignored, as below ``nohup``, it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _came
        _came = True
        signal.default_int_handler(number, frame)

    before, process = sys.unraisablehook, os.getpid()

    def again() -> None:
        """Interrupts once more, when the main thread has left the hook: Python would drop it within that too."""
        while True:
            time.sleep(_AGAIN_SECONDS)
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            while frame is not None and frame.f_code is not unraisable.__code__:
                frame = frame.f_back
            if frame is None:
                break
        os.kill(process, signal.SIGINT)

    def unraisable(about: Any) -> None:
        if about.exc_type is not None and issubclass(about.exc_type, KeyboardInterrupt):
            threading.Thread(target=again, daemon=True).start()  # Python has dropped it
        else:
            before(about)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable


def stop_watching() -> None:
    """At the end of the command: what is left is Python's own, which a Ctrl-C may cut short without a word."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
