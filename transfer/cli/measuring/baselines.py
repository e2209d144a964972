"""What strategies are compared with: the ways in which others bring master weights to the device, and the link.

They have the interface of a strategy but are registered nowhere: most of them need memory in
proportion to the model, or values that are on the host in another dtype already.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ...errors import StrategyUnavailableError
from ...in_flight import FINISHED, InFlightCopy
from ...interface import HostToDeviceTransfer
from ...strategies import PinnedStagedTransfer
from .names import DEEPSPEED, LINK, RING

RING_CONFIG = {"chunk_elements": 2**26, "buffers": 2}

_LINK_CHUNK_BYTES = 16 * 2**20
#: Memory of a baseline before ``prepare`` and after ``close``.
NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Baseline(HostToDeviceTransfer):
    """A copy of one source, which ``prepare`` is given first; finished when ``submit`` returns."""

    #: What it is, for people.
    summary: ClassVar[str]
    #: Whether anything reaches the destination.
    copies: ClassVar[bool] = True

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        super().__init__(None, accelerator)
        self._dtype = dtype
        self._pinned: list[Tensor] = []
        self._scratch = NOTHING

    @property
    def pinned_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._pinned)

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.nbytes

    def close(self) -> None:
        self._scratch = NOTHING
        while self._pinned:
            self.accelerator.unpin_memory(self._pinned[-1])
            self._pinned.pop()

    def _submit(self, destination: Tensor, source: Any) -> InFlightCopy:
        self._copy(destination, source)
        self.accelerator.synchronize(destination.device.index)
        return FINISHED

    @abstractmethod
    def _copy(self, destination: Tensor, source: Any) -> None:
        """Queues or does the copy; ``_submit`` waits for it."""

    def _pin(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Pinned memory for a whole partition; else ``StrategyUnavailableError``."""
        obstacle = self.accelerator.capabilities.why_not("pins_host_memory")
        if obstacle is not None:
            raise StrategyUnavailableError(obstacle)
        try:
            memory = self.accelerator.pin_empty(like.numel(), dtype=dtype)
        except REFUSALS as error:
            needed = like.numel() * dtype.itemsize
            raise StrategyUnavailableError(f"Pinning {needed} bytes for the whole partition failed: {error}") from error
        self._pinned.append(memory)
        if not self.accelerator.is_pinned(memory):
            raise StrategyUnavailableError(f"{self.accelerator.name}.pin_empty returned memory that is not pinned.")
        return memory


class DeepSpeedCopy(Baseline):
    """torch casts into a host temporary, and the host waits for its copy."""

    summary = "DeepSpeed's blocking destination.copy_(source)"

    def _copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)


class PinnedMaster(Baseline):
    summary = "pinned fp32 master, whole-partition copy, cast on the device (Megatron-LM, FSDP2)"

    def prepare(self, source: Tensor) -> None:
        self._pin(source, source.dtype).copy_(source)
        self._scratch = self.accelerator.device_empty(source.numel(), dtype=source.dtype)

    def _copy(self, destination: Tensor, source: Tensor) -> None:  # noqa: ARG002 - the master is the pinned one
        self.accelerator.enqueue_copy(self._scratch, self._pinned[0])
        self.accelerator.enqueue_copy(destination, self._scratch)


class PinnedLowPrecision(Baseline):
    summary = "cast into pinned memory for the whole partition, one copy (ZeRO-1, ZeRO-2)"

    def prepare(self, source: Tensor) -> None:
        self._pin(source, self._dtype)

    def _copy(self, destination: Tensor, source: Tensor) -> None:
        self._pinned[0].copy_(source)
        self.accelerator.enqueue_copy(destination, self._pinned[0])


class Link(Baseline):
    """The lower bound: values cast and pinned beforehand are copied in chunks, without a wait between them."""

    summary = "nothing but the destination's bytes from pinned memory, 16 MiB at a time"

    def prepare(self, source: Tensor) -> None:
        self._pin(source, self._dtype).copy_(source)

    def _copy(self, destination: Tensor, source: Tensor) -> None:  # noqa: ARG002 - cast beforehand
        size = _LINK_CHUNK_BYTES // self._dtype.itemsize
        for target, values in zip(torch.split(destination, size), torch.split(self._pinned[0], size), strict=True):
            self.accelerator.enqueue_copy(target, values)


class PlainRing(PinnedStagedTransfer):
    summary = "a plain staging ring: two pinned buffers of 2^26 elements"


def make_baselines(accelerator: Accelerator, dtype: torch.dtype) -> dict[str, HostToDeviceTransfer]:
    """Each baseline by its name, in the order of a table; pins nothing yet. Each has a ``summary`` for the legend."""
    return {
        LINK: Link(accelerator, dtype),
        DEEPSPEED: DeepSpeedCopy(accelerator, dtype),
        RING: PlainRing(RING_CONFIG, accelerator),
        "pinned master": PinnedMaster(accelerator, dtype),
        "pinned low-precision copy": PinnedLowPrecision(accelerator, dtype),
    }
