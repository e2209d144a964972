"""Removes the directories of runs that have ended, whose locks the system has released.

Nothing here waits, and nothing here raises: a directory that cannot be judged or removed costs space, and no values.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .mounts import is_local, machine

logger = logging.getLogger("transfer")

#: Prefix of the directories of runs; they have a dot before it while they are made.
PREFIX = "h2d-swap-"
#: The file that a run holds locked in its directory.
LOCK = "lock"
#: The file that names the run's machine.
MACHINE = "machine"
#: More than any name of a machine: what else stands there is not read.
_MOST_BYTES = 256
#: Neither follows a link nor waits for the other end of a pipe.
_PLAINLY = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
#: The whole name: other directories may have the prefix too.
_NAME = re.compile(rf"\.?{PREFIX}rank[0-9]+-pid[0-9]+-\w+")


def remove_leftovers(root: Path) -> None:
    """Removes the directories of this user's runs that have ended. Logs what it cannot remove."""
    with _only_logged():
        for path in sorted(each for each in root.iterdir() if _NAME.fullmatch(each.name)):
            with _only_logged():
                if not path.is_symlink() and path.is_dir() and path.stat().st_uid == os.getuid():
                    _remove_if_dead(path)


def try_lock(descriptor: int) -> bool:
    """Locks a file; returns False where files cannot be locked. Does not wait.

    Closing the last copy of the descriptor releases the lock.

    Raises:
        BlockingIOError: Another descriptor holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # another system
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return False
    return True


def empty(path: Path) -> None:
    """Removes all files but the lock, by which the next process sees that it may remove the rest."""
    for each in path.iterdir():
        if each.name != LOCK and not each.is_dir():
            each.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_logged() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass  # its process, or another one that tidies up, has removed it just now
    except Exception as error:  # noqa: BLE001 - whatever a crash has left there
        logger.warning("the swap files of a run that has ended could not be removed: %s", error)


def _remove_if_dead(path: Path) -> None:
    try:
        lock = os.open(path / LOCK, os.O_RDWR | _PLAINLY)
    except FileNotFoundError:
        # A cleaner of old files has removed the lock, and the run may live: its directory is not empty, and stays.
        # Or a run makes the directory now, and then makes another one; or was killed while it did.
        with contextlib.suppress(OSError):
            path.rmdir()
        return
    try:
        # Held until all is gone: a run that makes this directory now cannot lock it, and makes another one.
        with contextlib.suppress(BlockingIOError):
            if try_lock(lock) and _locks_are_seen(path):
                _delete(path)
    finally:
        os.close(lock)


def _locks_are_seen(path: Path) -> bool:
    """Whether a lock of the run would be seen here: on a shared file system, another machine's may not be."""
    try:
        descriptor = os.open(path / MACHINE, os.O_RDONLY | _PLAINLY)
    except FileNotFoundError:
        theirs = b""
    else:
        try:
            theirs = os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)
    return theirs == machine().encode() or is_local(path)


def _delete(path: Path) -> None:
    num_bytes = sum(each.lstat().st_size for each in path.iterdir())
    empty(path)
    shutil.rmtree(path)
    logger.info("removed %s with %d bytes of swap files of a run that has ended", path, num_bytes)
