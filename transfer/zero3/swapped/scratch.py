"""DeepSpeed's folder of swap files: marked while a run uses it, and spread over several drives.

Between steps, a part of the state may be newer in memory than in the files; a run that was killed leaves such files
behind. So a file beside the folder says that they are scratch. It is locked while the run lives: two runs with one
``nvme_path`` would write each other's files, as DeepSpeed gives them the same names.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from ...errors import SwapError, swap_error
from ...nvme.leftovers import try_lock
from ...nvme.mounts import machine

_SUFFIX = ".h2d-scratch"
_TEXT = """\
The files in {name}, beside this one, are scratch of a training run: it uses them now, or it was killed.
They may be out of date, or half written. Do not resume from them: load a checkpoint.
"""

_guard = threading.RLock()
#: Each marked folder: the locked descriptor of its mark, and how many engines of this process use it.
_marked: dict[Path, tuple[int, int]] = {}


def mark(folder: Path) -> None:
    """Marks a folder of swap files as in use by this process. ``unmark`` undoes one call.

    Raises:
        SwapError: Another process uses it, or the mark cannot be written.
    """
    folder, path = folder.resolve(), _mark_of(folder)
    with _guard:
        descriptor, uses = _marked.get(folder, (-1, 0))
        if not uses:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    try_lock(descriptor)
                    os.truncate(descriptor, 0)
                    os.write(descriptor, _TEXT.format(name=folder.name).encode())
                except BaseException:
                    os.close(descriptor)
                    raise
            except BlockingIOError:
                message = "another process uses these swap files; give each run a `nvme_path` of its own"
                raise SwapError(errno.EBUSY, message, str(folder)) from None
            except OSError as error:
                raise swap_error(error, "swap files cannot be marked as in use", path) from error
        _marked[folder] = (descriptor, uses + 1)


def unmark(folder: Path) -> None:
    """Undoes one ``mark``; the last one deletes the mark. A folder that is not marked is fine."""
    folder = folder.resolve()
    with _guard:
        descriptor, uses = _marked.pop(folder, (-1, 0))
        if uses > 1:
            _marked[folder] = (descriptor, uses - 1)
        elif uses:
            with contextlib.suppress(OSError):
                _mark_of(folder).unlink()
            os.close(descriptor)


def spread(paths: Sequence[str], first: int, roots: Sequence[str]) -> None:
    """Moves files to other drives, by turns; a link stays where DeepSpeed looks for each. Blocks.

    DeepSpeed reads and writes through the links, and its checkpoints have the files themselves.

    Args:
        paths: Of DeepSpeed's files.
        first: The number of the first one. The first of as many as there are drives stays on DeepSpeed's.
        roots: Directories on the other drives, made if they are missing.

    Raises:
        SwapError: A file cannot be moved; the subclass says why. It is where it was.
    """
    for number, name in enumerate(paths, first):
        path, drive = Path(name), number % (len(roots) + 1)
        wanted = _place(path, roots[drive - 1]) if drive else None
        try:
            now = path.readlink() if path.is_symlink() else None
            if now != wanted:
                _move(path, wanted)
        except OSError as error:
            raise swap_error(error, "optimizer state cannot be moved to another drive", wanted or path) from error


def _mark_of(folder: Path) -> Path:
    folder = folder.resolve()
    return folder.parent / (folder.name + _SUFFIX)


def _place(path: Path, root: str) -> Path:
    """Where a file lies on another drive: the same in every run, as DeepSpeed's own path is."""
    owner = hashlib.sha256(f"{_machine()}\0{path.parent.resolve()}".encode()).hexdigest()[:16]
    return Path(root).expanduser().absolute() / f"h2d-state-{owner}" / path.name


def _machine() -> str:
    """Tells apart the machines whose drives have the same paths; the same after a restart, where that is known."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return machine()


def _move(path: Path, wanted: Path | None) -> None:
    """Copies a file, or what a link leads to, and lets ``path`` lead to the copy, at once."""
    before = path.resolve()
    descriptor, new = tempfile.mkstemp(prefix=".h2d-", dir=path.parent)
    os.close(descriptor)
    try:
        if wanted is None:
            shutil.copyfile(path, new)
        else:
            wanted.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copyfile(path, wanted)
            os.unlink(new)  # noqa: PTH108 - a name that was free a moment ago
            os.symlink(wanted, new)  # noqa: PTH211
        os.replace(new, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)  # noqa: PTH108
        raise
    if before != path.resolve() and before.parent.name.startswith("h2d-state-"):
        with contextlib.suppress(OSError):
            before.unlink()


def _start_afresh() -> None:
    """In a forked child: the parent's lock must not outlive the parent."""
    global _guard
    _guard = threading.RLock()
    for descriptor, _ in _marked.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _marked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
