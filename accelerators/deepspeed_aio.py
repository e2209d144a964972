"""DeepSpeed's op for reading files with libaio, where it is built already; nothing here builds it.

The benchmarks measure it as a baseline. No strategy uses it: the op reports failed requests as done, does not read the
end of a length that is not a multiple of 512 bytes, and aborts the process where memory cannot be locked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

#: Of each handle: bytes of a request, and requests at once.
_BLOCK_BYTES = 2**20
_QUEUE_DEPTH = 32
#: Of Linux on x86 and ARM.
_MAP_LOCKED = 0x2000
#: How long loading the op may take, in each of several processes that load it in turn.
_LOADING_SECONDS = 20.0


@functools.cache
def unavailable_reason() -> str | None:
    """Why the op cannot be used in this process, as one sentence, or None. Cached; may load the op."""
    try:
        _load()
    except _NotThereError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a build of another torch, a missing libaio: whatever loading it raises
        return f"DeepSpeed's aio op does not load ({type(error).__name__}: {error}); it needs libaio."
    return None


def settings(threads: int, block_bytes: int = _BLOCK_BYTES) -> dict[str, Any]:
    """The section ``aio`` of a DeepSpeed config whose handles are those of ``make_handle``."""
    return {
        "block_size": block_bytes,
        "queue_depth": _QUEUE_DEPTH,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": threads,
    }


def make_handle(threads: int, block_bytes: int = _BLOCK_BYTES) -> Any:
    """A handle of the op, whose ``threads`` share each request, in blocks. With one, the calling thread reads.

    Raises:
        Exception: What loading the op raises where ``unavailable_reason`` gives one.
    """
    return _load().aio_handle(*settings(threads, block_bytes).values())


def may_lock_bytes(num_bytes: int) -> bool:
    """Whether the process may lock this much more memory; else ``new_cpu_locked_tensor`` aborts it."""
    if num_bytes == 0:
        return True
    try:  # the system counts what it maps as locked, although nothing can be in memory that may not be used
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_LOCKED, prot=0).close()
    except OSError:
        return False
    return True


class _NotThereError(Exception):
    """The op is not built, or another process seems to build it."""


@functools.cache
def _load() -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if importlib.util.find_spec(builder.absolute_name()) is not None:  # built when DeepSpeed was installed
        return importlib.import_module(builder.absolute_name())
    for each in (builder, *_needed_by(builder)):
        _check_built(each)
    # DeepSpeed asks the standard error for its descriptor, and takes a replaced one, without one, for a missing libaio.
    with contextlib.redirect_stderr(sys.__stderr__ or sys.stderr):
        if not builder.is_compatible(verbose=False):
            raise _NotThereError("DeepSpeed's aio op does not fit this machine: it needs libaio (package libaio-dev).")
        return builder.load(verbose=False)


def _needed_by(builder: Any) -> list[Any]:
    """The op that the aio op takes its locked memory from, in DeepSpeed 0.19.4 and later."""
    try:
        from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder
    except ImportError:
        return []
    return [PinMemoryBuilder()] if builder.name != PinMemoryBuilder.NAME else []


def _check_built(builder: Any) -> None:
    """Raises unless this environment's DeepSpeed has built the op here: loading any other one builds it."""
    folder = _build_folder(builder.name)
    if _stays_locked(folder / "lock"):
        raise _NotThereError(
            f"DeepSpeed's aio op is being built, or such a build was interrupted; if so, delete {folder / 'lock'}."
        )
    op, recipe = folder / f"{builder.name}.so", folder / "build.ninja"
    if not (op.exists() and recipe.exists()):
        raise _NotThereError("DeepSpeed's aio op is not built; its first use by DeepSpeed builds it, in minutes.")
    source = os.path.abspath(builder.deepspeed_src_path(builder.sources()[0]))  # noqa: PTH100 - as DeepSpeed has it
    if source not in recipe.read_text() or op.stat().st_mtime < recipe.stat().st_mtime:
        raise _NotThereError(
            f"DeepSpeed's aio op in {folder} was built by another environment; let DeepSpeed build it here, or set "
            "TORCH_EXTENSIONS_DIR to a directory of this environment's own."
        )


def _stays_locked(lock: Path) -> bool:
    """Whether the op is being built, or a build was killed. Waits for processes that load it, which lock it briefly."""
    deadline = time.monotonic() + _LOADING_SECONDS
    with contextlib.suppress(FileNotFoundError):
        while time.time() - lock.stat().st_mtime < _LOADING_SECONDS and time.monotonic() < deadline:
            time.sleep(0.05)
    return lock.exists()


def _build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))
