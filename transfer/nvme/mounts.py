"""Which machine this is, and whether a file system is seen by others too."""

from __future__ import annotations

import os
import socket
from pathlib import Path

#: File systems on drives, or in the memory, of one machine.
_LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})


def machine() -> str:
    """Names the running kernel: containers on one machine have the same, and a restart makes another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def is_local(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether the file system at ``path`` is known to be on this machine alone.

    Args:
        path: An existing directory.
        mounts: The kernel's table; for tests.
    """
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    here, best, kind = os.path.realpath(path), "", ""
    for fields in lines:
        point = fields[4].encode().decode("unicode_escape")  # blanks are written as \040
        if (here == point or here.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, fields[fields.index("-") + 1]
    return kind in _LOCAL
