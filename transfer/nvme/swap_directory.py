"""Whose swap files are whose: a directory for each process, locked while it lives.

Swap files are scratch. They are deleted with their handles and at the end of the process; what a killed
process leaves behind is deleted by the next one that swaps out to the same place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from ..errors import swap_error
from .mounts import is_local, machine
from .paths import absolute

logger = logging.getLogger("transfer")

_PREFIX = "h2d-swap-"
#: What ``_make`` calls a directory: others may have names that begin alike.
_NAME = re.compile(_PREFIX + r"rank[0-9]+-pid[0-9]+-\w+")
_LOCK = "lock"
#: Stays in the root: to delete it would take it from under somebody who waits for it.
_ROOT_LOCK = ".h2d-swap-lock"
_MACHINE = "machine"
#: Of the names of files that hold values, or are to.
_VALUES = (".swap", ".part")
#: Of the 255 bytes that a name may have: the rest is for what makes it unique.
_LABEL_CHARACTERS = 80


class SwapDirectory:
    """This process's own directory below a root. Made by ``swap_directory``.

    Args:
        path: The directory.
        lock: A descriptor of its lock file, which is locked for as long as the process lives.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._numbers = itertools.count()
        self._lock = lock
        # In reverse order of creation at exit, and so after the files.
        weakref.finalize(self, _remove, path, lock, os.getpid())

    def new_path(self, name: str | None) -> Path:
        """A path that nobody has used, whatever ``name`` is."""
        number = next(self._numbers)
        if name is None:
            return self.path / f"tensor-{number}.swap"
        label = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LABEL_CHARACTERS]
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return self.path / f"{label}-{digest}-{number}.swap"

    def leave_to_parent(self) -> None:
        """In a forked child: the lock is the parent's, and must not outlive it."""
        with contextlib.suppress(OSError):
            os.close(self._lock)


class OwnedFile:
    """A file that is deleted when this object goes, by ``delete``, or at the end of the process that made it."""

    def __init__(self, path: Path, directory: SwapDirectory) -> None:
        self._path = path
        self._directory = directory  # lives as long as its files
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _unlink, path, self._process)

    def delete(self) -> None:
        """Deletes the file; twice is fine.

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
_locks: set[Path] = set()  # of roots, which this process is about to hold or holds
_guard = threading.RLock()


def swap_directory(root: str | os.PathLike[str]) -> SwapDirectory:
    """This process's directory below ``root``, made when it is first asked for.

    Then also deletes the directories of runs that are dead: nobody holds their lock.

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
                known = _make(path)
            except FileExistsError as error:
                raise swap_error(
                    NotADirectoryError(errno.ENOTDIR, ""), "give a directory on the drive", path
                ) from error
            except (OSError, ValueError) as error:
                raise swap_error(error, "values cannot be swapped out to this directory", path) from error
            _directories[path] = known
        return known


def _make(root: Path) -> SwapDirectory:
    # A directory is made and locked under the root's lock: nobody takes it for dead in between.
    with _locked(root / _ROOT_LOCK) as locks:
        if locks:
            _remove_dead(root)
        rank = re.sub(r"[^0-9]", "", os.environ.get("RANK", "")) or "0"
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}rank{rank}-pid{os.getpid()}-", dir=root))  # mode 0700
        (path / _MACHINE).write_text(machine())
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _flock(lock)
        return SwapDirectory(path, lock)


def _remove_dead(root: Path) -> None:
    for path in sorted(root.glob(f"{_PREFIX}rank*")):
        with _only_logged():
            if not _NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
                continue
            if path.stat().st_uid == os.getuid() and _is_dead(path):
                num_bytes = sum(each.stat().st_size for each in path.iterdir())
                _empty(path)
                shutil.rmtree(path)
                logger.info("removed %s with %d bytes of swap files of a run that has ended", path, num_bytes)


@contextlib.contextmanager
def _only_logged() -> Iterator[None]:
    """What cannot be removed costs space, and no values."""
    try:
        yield
    except FileNotFoundError:
        pass  # its process has ended just now, and removes it itself
    except OSError as error:
        logger.warning("the swap files of a run that has ended could not be removed: %s", error)


def _is_dead(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Killed while it was made; or somebody who cleans up has removed the lock, and nobody knows.
        if any(each.suffix in _VALUES for each in path.iterdir()):
            return False
        lock = None
    try:
        if lock is not None and not _flock(lock, wait=False):
            return False
    finally:
        if lock is not None:
            os.close(lock)
    # Locks of another machine are not always seen on a shared file system.
    theirs = (path / _MACHINE).read_text() if (path / _MACHINE).exists() else machine()
    return theirs == machine() or is_local(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock file; gives False where it cannot be locked, and so nobody is known to be dead."""
    if path in _locks:  # by this thread, which a signal handler or a finalizer interrupts: to wait would be for ever
        yield False
        return
    _locks.add(path)
    descriptor = None
    try:
        descriptor = _open_lock(path)
        yield descriptor is not None and _flock(descriptor)
    finally:
        _locks.discard(path)
        if descriptor is not None:
            _unlock(descriptor)
            os.close(descriptor)


def _open_lock(path: Path) -> int | None:
    """A lock file that every user of the root may share; None where another one keeps it to himself."""
    # Another user's may be readable alone, and O_CREAT is refused for it in a directory such as /tmp.
    for flags in (os.O_RDWR, os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except (FileNotFoundError, PermissionError):
            continue
        if flags & os.O_CREAT:
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, 0o644)  # whatever the umask
        return descriptor
    return None


def _flock(descriptor: int, wait: bool = True) -> bool:
    """Whether the lock was taken; it is given back when the last copy of the descriptor is closed."""
    try:
        import fcntl
    except ImportError:  # another system
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    """Gives a lock back, also where a process forked meanwhile has a copy of the descriptor."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _unlink(path: Path, process: int) -> None:
    if process == os.getpid():  # a fork's copy of the handle owns nothing
        with contextlib.suppress(OSError):
            path.unlink()


def _remove(path: Path, lock: int, process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(OSError):
            _empty(path)
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(lock)


def _empty(path: Path) -> None:
    """Removes all but the lock, which tells that the rest may go: whoever is killed meanwhile leaves it there."""
    for each in path.iterdir():
        if each.name != _LOCK and not each.is_dir():
            each.unlink(missing_ok=True)


def _start_afresh() -> None:
    """In a forked child: it swaps out to a directory of its own, and the parent's is the parent's."""
    global _guard
    _guard = threading.RLock()
    for directory in _directories.values():
        directory.leave_to_parent()
    _directories.clear()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
