"""What a policy chooses for copies of given sizes, and for others that differ from them in one thing.

Nothing of their size is allocated. The policy looks at sizes, dtypes and where memory is, and never at values: so
addresses without memory pose as both sides.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ...config import TransferConfig
from ...errors import MachineProfileWarning
from ...memory.host_budget import page_lock_budget_bytes
from ...policy import Decision, TransferPolicy
from ...registry import MEASURED

#: Sizes at which another choice begins are looked for up to this one.
MOST_ELEMENTS = 2**34


@dataclass(frozen=True)
class Asker:
    """Asks the policy of one configuration.

    Attributes:
        config: The configuration.
        accelerator: Where copies go.
        dtype: Of the destinations; sources are fp32.
    """

    config: TransferConfig
    accelerator: Accelerator
    dtype: torch.dtype

    def ask(self, elements: int, *, prepared: bool) -> Decision:
        """The choice for a copy whose source is page-locked, or is not."""
        destination, source = _address(elements, self.dtype), _address(elements, torch.float32)
        posing: Any = _Posing(self.accelerator, destination, prepared)
        policy = TransferPolicy(self.config, posing)
        return policy.choose(posing, destination, source, waits=policy.config.completion != "deferred")

    def is_prepared(self, elements: int) -> bool:
        """Whether ZeRO-3 page-locks such a master when it is attached."""
        policy = TransferPolicy(self.config, self.accelerator)
        names = policy.preparing(_address(elements, torch.float32))
        section: Any = self.config.section("pinned_direct")
        return "pinned_direct" in names and section.page_lock

    def explain(self, elements: int) -> dict[str, Any]:
        """The choice for one sub-group, and what would change it."""
        prepared = self.is_prepared(elements)
        decision = self.ask(elements, prepared=prepared)
        changes = [
            {"if": what, "strategy": other.strategy, "reason": other.reason}
            for what, other in self._others(elements, prepared)
            if other.strategy != decision.strategy
        ]
        return {
            "elements": elements,
            "bytes": elements * self.dtype.itemsize,
            "page_locked": prepared,
            "strategy": decision.strategy,
            "reason": decision.reason,
            "instead_of": decision.instead_of,
            "changes": changes,
        }

    def ask_as_attached(self, elements: int) -> Decision:
        """The choice for a master that ZeRO-3 has page-locked, where it does that."""
        return self.ask(elements, prepared=self.is_prepared(elements))

    def _others(self, elements: int, prepared: bool) -> Iterator[tuple[str, Decision]]:
        without = "the source were not page-locked" if prepared else "the source were page-locked (`prepare`)"
        yield without, self.ask(elements, prepared=not prepared)
        for what, changed in self._changed():
            with warnings.catch_warnings():  # that there is no profile to go by
                warnings.simplefilter("ignore", MachineProfileWarning)
                yield what, replace(self, config=changed).ask_as_attached(elements)
        same = self._same_as(elements)
        for end, relation in ((1, "at most"), (MOST_ELEMENTS, "at least")):
            size = self._nearest(elements, end, same)
            if size is not None:
                yield f"it had {relation} {size:,} elements", self.ask_as_attached(size)

    def _changed(self) -> Iterator[tuple[str, TransferConfig]]:
        """The configuration without one of its parts."""
        rules = self.config.rules
        for index in range(len(rules)):
            yield (
                f"rules[{index}] were left out",
                self.config.model_copy(update={"rules": (*rules[:index], *rules[index + 1 :])}),
            )
        if self.config.strategy is None:
            yield "`strategy` were `measured`", self.config.model_copy(update={"strategy": MEASURED})
        else:
            yield "`strategy` were left out", self.config.model_copy(update={"strategy": None})

    def _same_as(self, elements: int) -> Callable[[int], bool]:
        wanted = self.ask_as_attached(elements).strategy
        return lambda size: self.ask_as_attached(size).strategy == wanted

    def _nearest(self, elements: int, end: int, same: Callable[[int], bool]) -> int | None:
        """The size between ``elements`` and ``end`` that is nearest to ``elements`` and has another choice, if any.

        Sizes are tried in powers of two, and then halved: of choices that come and go within a factor of two, one may
        be missed.
        """
        inside, outside = elements, None
        while inside != end:
            step = max(end, inside // 2) if end < inside else min(end, inside * 2)
            if not same(step):
                outside = step
                break
            inside = step
        if outside is None:
            return None
        while abs(outside - inside) > 1:
            middle = (outside + inside) // 2
            inside, outside = (middle, outside) if same(middle) else (inside, middle)
        return outside


class _Posing:
    """The accelerator, for two tensors that are not what they seem: one poses as its memory, one as the host's.

    Args:
        real: The accelerator.
        destination: What poses as the device's memory.
        pinned: Whether the source poses as memory that the device reads directly.
    """

    def __init__(self, real: Accelerator, destination: Tensor, pinned: bool) -> None:
        for name in (*Accelerator.__annotations__, *(each for each in vars(Accelerator) if each[0] != "_")):
            setattr(self, name, getattr(real, name))
        there = destination.data_ptr()
        self.on_device = lambda tensor: tensor.data_ptr() == there
        self.on_host = lambda tensor: tensor.data_ptr() != there
        self.is_pinned = lambda tensor: pinned and tensor.data_ptr() != there


def _address(elements: int, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor whose memory can be neither read nor written, and so takes none."""
    pages = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    return torch.frombuffer(pages, dtype=dtype, count=elements)


def budget(explained: list[Mapping[str, Any]], config: TransferConfig) -> dict[str, Any]:
    """What all of these together page-lock, and what a rank may."""
    section: Any = config.section("pinned_direct")
    allowed = section.max_page_locked if section.max_page_locked is not None else page_lock_budget_bytes()
    wanted = sum(4 * one["elements"] for one in explained if one["page_locked"])
    return {"wanted_bytes": wanted, "allowed_bytes": allowed}
