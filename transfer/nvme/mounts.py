"""The machine's name, and the type of a file system, which says whether other machines see it."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

#: File systems on drives, or in the memory, of one machine.
_LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
#: Of these, the ones in memory: to read a file there is to copy memory.
MEMORY_FILE_SYSTEMS = frozenset({"ramfs", "tmpfs"})
#: How the kernel's table writes blanks, line ends and backslashes.
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def machine() -> str:
    """Names the running kernel: containers on one machine have the same, and a restart makes another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def is_local(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether the file system of an existing directory is known to be on this machine alone."""
    return file_system(path, mounts) in _LOCAL


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of an existing directory's file system, such as ``ext4``; None where the system does not tell."""
    try:
        lines = [line.split(b" ") for line in mounts.read_bytes().split(b"\n") if line]
    except OSError:
        return None
    here, best, kind = os.fsencode(os.path.realpath(path)), b"", None  # names are bytes, of any encoding
    for fields in lines:
        point = _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), fields[4])
        if (here == point or here.startswith(point.rstrip(b"/") + b"/")) and len(point) >= len(best):
            best, kind = point, fields[fields.index(b"-") + 1].decode("ascii", "replace")
    return kind
