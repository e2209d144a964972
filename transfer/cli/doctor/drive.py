"""The drive that state is to be swapped to: its space, O_DIRECT, and files that were cut short there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ...nvme.aligned_memory import ALIGNMENT_BYTES, aligned_empty, buffer_of
from ...nvme.mounts import MEMORY_FILE_SYSTEMS, file_system
from ...nvme.open_file import NOT_DIRECT, O_DIRECT
from ...stats import format_bytes
from .finding import Finding, no, note, ok, unknown

#: A drive is called full where less of it is free.
_LITTLE = 0.05
#: How many swap files are looked at; a run of this size has more than enough.
_MOST_FILES = 20_000
_SECTOR = 512
#: File systems on which a file takes all the blocks that were written.
_WITHOUT_COMPRESSION = frozenset({"ext4", "xfs", "tmpfs"})


def look(directory: str) -> Iterator[Finding]:
    """What there is to know of the file system of a directory, in which a small file is written and removed."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        yield no("drive", "DIR is no directory here", "an existing directory", "Make it, or name another one.")
        return
    kind = file_system(path)
    if kind in MEMORY_FILE_SYSTEMS:
        yield note("drive", f"{kind}, which is memory", "a drive", "Name a directory on an NVMe drive.")
    else:
        yield ok("drive", kind or "a file system of unknown type")
    yield _space(path)
    yield _direct(path)
    yield _swap_files(path)


def _space(path: Path) -> Finding:
    usage = shutil.disk_usage(path)
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    wanted = "12 bytes for each parameter of a rank's share, for CPU Adam's state"
    if usage.free < _LITTLE * usage.total:
        return note(
            "space",
            found,
            wanted,
            "Free some. DeepSpeed's aio op reports success on a full drive, and its files are short.",
        )
    return ok("space", found)


def _direct(path: Path) -> Finding:
    """Whether a block can be written past the page cache."""
    if not O_DIRECT:
        return unknown("O_DIRECT", "this system has none")
    try:
        descriptor, name = tempfile.mkstemp(prefix=".h2d-doctor-", dir=path)
    except OSError as error:
        return no(
            "O_DIRECT", f"a file cannot be written: {error.strerror}", "to write files", "Name another directory."
        )
    os.close(descriptor)
    try:
        descriptor = os.open(name, os.O_RDWR | O_DIRECT)
        try:
            os.pwritev(descriptor, [buffer_of(aligned_empty(ALIGNMENT_BYTES))], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            return no("O_DIRECT", f"a block cannot be written: {error.strerror}", "to write files", "Free some space.")
        return note(
            "O_DIRECT",
            "refused by this file system",
            "reads and writes past the page cache",
            "Name a directory on ext4 or xfs; elsewhere, the page cache serves, which costs memory and speed.",
        )
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()
    return ok("O_DIRECT", "works")


def _swap_files(path: Path) -> Finding:
    total = short = 0
    for sizes in _folders(path):
        total += len(sizes)
        short += short_files([size for size, _ in sizes])
        short += sum(1 for size, written in sizes if size and written < size)
    if not total:
        return ok("swap files", "none of DeepSpeed's")
    found = f"{total} of DeepSpeed's (*.swp)"
    if short:
        return no(
            "swap files",
            f"{found}, {short} of them short",
            "every byte written",
            "The drive was full: DeepSpeed's aio op reports success then. Free space, and resume from a checkpoint.",
        )
    return ok("swap files", f"{found}, none of them seems short")


def short_files(sizes: Sequence[int]) -> int:
    """How many swap files of one rank were cut short, as far as their lengths tell.

    Nothing says how long a file is to be. But none is empty, each is a multiple of 512 bytes, and the master and the
    two moments of a sub-group are of one length.
    """
    odd = [size for size in sizes if size == 0 or size % _SECTOR]
    whole = Counter(size for size in sizes if size and size % _SECTOR == 0)
    alone = sorted(size for size, count in whole.items() if count % 3)
    if odd or len(sizes) % 3:  # the first step has masters alone
        return len(odd)
    return sum(whole[size] % 3 for size in alone[:-1])


def _folders(path: Path) -> Iterator[list[tuple[int, int]]]:
    """The length and the written bytes of each swap file, for each folder with such files below a directory."""
    left = _MOST_FILES
    holes = file_system(path) in _WITHOUT_COMPRESSION
    for folder, _, names in os.walk(path / "zero_stage_3"):
        found = []
        for name in islice((name for name in sorted(names) if name.endswith(".swp") and "gradient" not in name), left):
            with contextlib.suppress(OSError):
                size = Path(folder, name).stat()
                found.append((size.st_size, size.st_blocks * 512 if holes else size.st_size))
        left -= len(found)
        if found:
            yield found
