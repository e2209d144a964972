"""The directory of swap files of each process, locked while the process lives.

Swap files are scratch. They are deleted with their handles and at the end of the process. The next process that swaps
out to the same place deletes what a killed process leaves behind (``leftovers``).

A directory is made under a name that begins with a dot, locked, and renamed: a process that sees the final name
also sees the lock. So no process waits for another one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

from ..errors import SwapFileNotFoundError, swap_error
from .leftovers import LOCK, MACHINE, PREFIX, empty, remove_leftovers, try_lock
from .mounts import machine

#: The part of a file's name that comes from the caller. A name may have 255 bytes; the rest makes it unique.
_LABEL_CHARACTERS = 80
#: Between its creation and its lock, a new directory can be taken for a leftover; not so many times in a row.
_ATTEMPTS = 100


class SwapDirectory:
    """This process's own directory below a root. Made by ``swap_directory``.

    Args:
        path: The directory.
        lock: A descriptor of its lock file, which is locked for as long as the process lives.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._numbers = itertools.count()
        # Finalizers run in reverse order of creation at exit, so this one runs after those of the files.
        weakref.finalize(self, _remove, path, lock, os.getpid())

    def new_path(self, name: str | None) -> Path:
        """A path that was not used before, whatever ``name`` is."""
        number = next(self._numbers)
        if name is None:
            return self.path / f"tensor-{number}.swap"
        label = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LABEL_CHARACTERS]
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return self.path / f"{label}-{digest}-{number}.swap"


class OwnedFile:
    """A file that is deleted with this object, by ``delete``, or at the end of the process that made it."""

    def __init__(self, path: Path, directory: SwapDirectory) -> None:
        self._path = path
        self._directory = directory  # lives as long as its files
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _unlink, path, self._process)

    def delete(self) -> None:
        """Deletes the file. Idempotent.

        Raises:
            SwapError: It cannot be deleted.
        """
        self._finalizer.detach()
        try:
            if self._process == os.getpid():
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise swap_error(error, "the swap file cannot be deleted", self._path) from error


_directories: dict[Path, SwapDirectory] = {}
_guard = threading.RLock()
#: Descriptors of the locks that this process holds: a forked child closes its copies.
_locks: set[int] = set()


def swap_directory(root: str | os.PathLike[str]) -> SwapDirectory:
    """This process's directory below ``root``, made when it is first asked for.

    Then also deletes the directories of runs that have ended. What cannot be deleted is logged.

    Args:
        root: Made if it is missing, with its parents; ``~`` stands for the home directory.

    Raises:
        SwapError: It cannot be made or written; the subclass says which.
    """
    path = absolute(root)
    with _guard:
        known = _directories.get(path)
        if known is None or not known.path.is_dir():
            try:
                path.mkdir(parents=True, exist_ok=True)
                remove_leftovers(path)
                known = _make(path)
            except FileExistsError as error:
                raise swap_error(
                    NotADirectoryError(errno.ENOTDIR, ""), "give a directory on the drive", path
                ) from error
            except (OSError, ValueError) as error:
                raise swap_error(error, "values cannot be swapped out to this directory", path) from error
            _directories[path] = known
        return known


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path, whatever the working directory becomes; ``~`` stands for the home directory. Links are kept.

    Raises:
        SwapFileNotFoundError: It is empty, or its home directory does not exist.
    """
    if not os.fspath(path):  # which pathlib would take for the working directory
        raise SwapFileNotFoundError(errno.ENOENT, "the path is empty", "")
    try:
        return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - `resolve` would follow links
    except RuntimeError as error:
        message = "there is no such home directory; write the path without `~`"
        raise SwapFileNotFoundError(errno.ENOENT, message, str(path)) from error


def _make(root: Path) -> SwapDirectory:
    rank = re.sub(r"[^0-9]", "", os.environ.get("RANK", "")) or "0"
    for _ in range(_ATTEMPTS):
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}rank{rank}-pid{os.getpid()}-", dir=root))  # mode 0700
        lock = None
        try:
            # FileNotFoundError, BlockingIOError: another process removes the directory as a leftover.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                lock = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                _locks.add(lock)
                try_lock(lock)
                (hidden / MACHINE).write_text(machine())
                path = root / hidden.name.removeprefix(".")
                hidden.rename(path)
                return SwapDirectory(path, lock)
        except BaseException:
            _remove(hidden, lock, os.getpid())
            raise
        _remove(hidden, lock, os.getpid())
    raise OSError(errno.EAGAIN, f"other processes have removed {_ATTEMPTS} directories while they were made")


def _remove(path: Path, lock: int | None, process: int) -> None:
    if process != os.getpid():  # a fork's copy of the handle owns nothing
        return
    with contextlib.suppress(OSError):
        empty(path)
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        _locks.discard(lock)
        with contextlib.suppress(OSError):
            os.close(lock)


def _unlink(path: Path, process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(OSError):
            path.unlink()


def _start_afresh() -> None:
    """Runs in a forked child, which gets a directory of its own: the parent's lock must not outlive the parent."""
    global _guard
    _guard = threading.RLock()
    for lock in _locks:
        with contextlib.suppress(OSError):
            os.close(lock)
    _locks.clear()
    _directories.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
