"""Copies that are timed: one variant after the other copies the same values, and every bit is compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ...errors import TransferError
from ...interface import HostToDeviceTransfer
from ...nvme.swapped_tensor import SwappedTensor
from . import bits
from .ranks import Ranks


@dataclass
class Variant:
    """One way to copy, and what was measured of it on this rank."""

    name: str
    kind: str  # "baseline" or "strategy"
    transfer: HostToDeviceTransfer
    source: Tensor | SwappedTensor
    page_lock_seconds: float | None = None  # None: `prepare` page-locked nothing
    seconds: list[float] = field(default_factory=list)
    right_bits: bool | None = True  # None: nothing is copied that could be compared

    @property
    def from_file(self) -> bool:
        return isinstance(self.source, SwappedTensor)


@dataclass(frozen=True)
class Case:
    """One size and dtype: the values, where they go, and what must be there afterwards."""

    accelerator: Accelerator
    ranks: Ranks
    source: Tensor
    destination: Tensor
    expected: Tensor

    @classmethod
    def of(cls, accelerator: Accelerator, ranks: Ranks, elements: int, dtype: torch.dtype) -> Case:
        source = bits.source_values(elements)
        return cls(accelerator, ranks, source, accelerator.device_empty(elements, dtype=dtype), source.to(dtype))

    def __str__(self) -> str:
        return f"{self.source.numel():,} elements to {str(self.expected.dtype).removeprefix('torch.')}"

    def timed(self, variant: Variant) -> float:
        """Seconds of one copy, which begins on every rank at once."""
        started = self.ranks.start(self.accelerator)
        variant.transfer.copy(self.destination, variant.source)
        self.accelerator.synchronize()
        return time.perf_counter() - started

    def submitted(self, variant: Variant) -> tuple[float, float]:
        """Seconds for which ``submit`` holds the host, and until the values are there."""
        started = self.ranks.start(self.accelerator)
        copy = variant.transfer.submit(self.destination, variant.source)
        held = time.perf_counter() - started
        copy.wait()
        self.accelerator.synchronize()
        return held, time.perf_counter() - started

    def checked(self, variant: Variant) -> float:
        """Times one copy into a poisoned destination and compares the result bit for bit."""
        bits.poison(self.destination)
        seconds = self.timed(variant)
        if variant.right_bits is not None:
            variant.right_bits &= bits.same_bits(self.destination, self.expected)
        return seconds

    def refusal(self, variant: Variant) -> str | None:
        """Prepares a variant and copies once. Returns why some rank cannot, or None where all can."""
        return refusal(self.ranks, lambda: self._prepare(variant)) or refusal(self.ranks, lambda: self.checked(variant))

    def _prepare(self, variant: Variant) -> None:
        """Lets a strategy that page-locks in place do so with a source of its own: the others copy ordinary memory."""
        if variant.kind == "baseline":
            source: Any = variant.source  # baselines that read files size their buffers
            variant.transfer.prepare(source)
            return
        if variant.from_file:  # no memory to prepare
            return
        own = self.source.clone()
        started = time.perf_counter()
        variant.transfer.prepare(own)
        seconds = time.perf_counter() - started
        if self.accelerator.is_pinned(own):
            variant.source, variant.page_lock_seconds = own, seconds


def refusal(ranks: Ranks, attempt: Callable[[], object]) -> str | None:
    """Why an attempt was refused on some rank, or None. All ranks get the same answer, and so go on together."""
    try:
        attempt()
        reason = None
    except TransferError as error:
        reason = str(error)
    return next(filter(None, ranks.gather(reason)), None)
