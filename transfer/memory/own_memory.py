"""Host memory of our own under a tensor of other code: it stays mapped for as long as it is page-locked.

Memory that other code allocated is freed whenever that code likes: when torch moves a tensor to shared memory
(``torch.multiprocessing`` does that to what is sent through a queue), its old memory is freed under its registration,
and the next tensor there counts as page-locked while the device reads the old pages. A ``PageLock`` over memory of ours
keeps it mapped, so nothing else can come to lie there. That is why ZeRO-3's masters are moved here before they are
page-locked. Page-locking in place stays for every other source: moving those would part them from aliases that we
cannot see.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

#: Smaller ones are not worth a mapping of their own.
LEAST_BYTES = 2**16

_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def can_move(tensor: Tensor) -> bool:
    """Whether ``tensor`` alone has its memory: it is torch's own, shared with no process, and without another view."""
    storage = tensor.untyped_storage()
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.nbytes == storage.nbytes() >= LEAST_BYTES
        and storage.resizable()  # else it belongs to numpy, a file, or us
        and not storage.is_shared()
        and torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor's, and this function's
    )


def move(tensor: Tensor) -> bool:
    """Moves the values of a host tensor into memory of our own, by rebinding ``tensor.data``; it stays what it is.

    Blocks while the bytes are copied. Needs the tensor's bytes once more until then.

    Args:
        tensor: Not a view that the caller shares with others, and nothing reads or writes it meanwhile.

    Returns:
        Whether it was moved: not where ``can_move`` is False, or where the system refuses the memory.
    """
    if not can_move(tensor):
        return False
    try:
        memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (AttributeError, OSError, ValueError):  # another system, or a limit
        return False
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # page-locks faster
    moved = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    _maps[moved.data_ptr()] = memory
    tensor.data = moved
    return True


def mapping(address: int) -> mmap.mmap | None:
    """What keeps memory of ours mapped that begins at this address; None for other memory."""
    return _maps.get(address)
