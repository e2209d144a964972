"""DeepSpeed's op for reading files with libaio, if it is there already: it is never built from here."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

#: Of each handle: bytes a request, and requests at once.
_BLOCK_BYTES = 2**20
_QUEUE_DEPTH = 32
_CAP_IPC_LOCK = 1 << 14


@functools.cache
def unavailable_reason() -> str | None:
    """Why the op cannot be used in this process, as one sentence, or None. Asked once; may load the op."""
    try:
        _load()
    except _NotThereError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a build of another torch, a missing libaio: whatever loading it raises
        return f"DeepSpeed's aio op does not load ({type(error).__name__}: {error}); it needs libaio."
    return None


def make_handle() -> Any:
    """A handle that reads in the calling thread.

    Raises:
        Exception: What loading the op raises where ``unavailable_reason`` gives one.
    """
    return _load().aio_handle(_BLOCK_BYTES, _QUEUE_DEPTH, False, True, 1)


def read(handle: Any, memory: memoryview, path: str, offset: int) -> bool:
    """Fills memory from a file, in whole units of 512 bytes that all lie in the file; False where it could not.

    Args:
        handle: Of the calling thread alone.
        memory: Where to. What is not pinned, the op reads into a locked copy first.
        path: The file.
        offset: In the file.
    """
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    # The op aborts the process where it may not lock that copy.
    if not (torch.cuda.is_available() and tensor.is_pinned()) and _lock_limit_bytes() < 2 * tensor.nbytes:
        return False
    return int(handle.sync_pread(tensor, path, offset)) == 1


class _NotThereError(Exception):
    """The op is not built, or somebody seems to be building it."""


@functools.cache
def _load() -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if importlib.util.find_spec(builder.absolute_name()) is not None:  # built when DeepSpeed was installed
        return importlib.import_module(builder.absolute_name())
    folder = _build_folder(builder.name)
    if (folder / "lock").exists():
        raise _NotThereError(
            f"DeepSpeed's aio op is being built, or such a build was interrupted; if so, delete {folder / 'lock'}."
        )
    if not (folder / f"{builder.name}.so").exists():
        raise _NotThereError("DeepSpeed's aio op is not built; its first use by DeepSpeed builds it, in minutes.")
    if not builder.is_compatible(verbose=False):
        raise _NotThereError("DeepSpeed's aio op does not fit this machine: it needs libaio (package libaio-dev).")
    return builder.load(verbose=False)


def _build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


@functools.cache
def _lock_limit_bytes() -> int:
    import resource

    try:
        status = Path("/proc/self/status").read_text()
        effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        effective = _CAP_IPC_LOCK if os.geteuid() == 0 else 0
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return 2**62 if effective & _CAP_IPC_LOCK or soft == resource.RLIM_INFINITY else soft
