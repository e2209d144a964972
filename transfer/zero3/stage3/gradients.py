"""What DeepSpeed's ZeRO-3 optimizer keeps of gradients on the host, and how it fills it in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cpu_adam import updates_in_parts
from .names import HAS_OVERFLOW, PARTITION_GRADS
from .optimizer import Stage3
from .swapped import receiving, why_not_received

#: The attribute ``__param_id_to_grad_partition``.
_VIEWS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class Parameter(NamedTuple):
    """A parameter's part of this rank: its key, and where its gradient lies in that of its sub-group, in elements."""

    key: int
    offset: int
    numel: int


@dataclass(frozen=True)
class GradientState:
    """A view of the gradients that an optimizer keeps on the host.

    There are two of each: ``accumulated``, one buffer of all parameters, in the dtype of the gradients (16 bits, as a
    rule), which each reduction in backward writes; and ``master.grad``, one fp32 buffer for each sub-group, which the
    last reduction before a step writes, and which the step scales and reads.
    """

    stage3: Stage3

    @property
    def _optimizer(self) -> Any:
        return self.stage3.optimizer

    @property
    def accumulated(self) -> Tensor:
        """The gradients of all parameters, flat; sub-group after sub-group."""
        return self._optimizer.grad_partitions_flat_buffer  # type: ignore[no-any-return]

    @property
    def accumulates(self) -> bool:
        """Whether the reductions that run now add to what is there, and do not replace it."""
        return bool(self._optimizer.micro_step_id != 0)

    @property
    def pins(self) -> bool:
        """Whether the buffers on the host are pinned."""
        return bool(self._optimizer.offload_optimizer_pin_memory)

    def parameters(self, sub_group_id: int) -> list[Parameter]:
        """The parameters of a sub-group, in the order of their gradients."""
        optimizer = self._optimizer
        found = []
        for parameter in optimizer.fp16_groups[sub_group_id]:
            _, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            found.append(Parameter(self.key(parameter), offset, numel))
        return found

    @staticmethod
    def key(parameter: Any) -> int:
        """What a parameter of the model is known by."""
        return parameter.ds_id  # type: ignore[no-any-return]

    def view(self, key: int) -> Tensor:
        """Where reductions write the gradient of a parameter, in ``accumulated`` unless it was moved."""
        return getattr(self._optimizer, _VIEWS)[key]  # type: ignore[no-any-return]

    def move(self, key: int, to: Tensor) -> None:
        """Has reductions write the gradient of a parameter elsewhere."""
        getattr(self._optimizer, _VIEWS)[key] = to

    @contextlib.contextmanager
    def reducing_into(self, find: Callable[[int], Tensor | None]) -> Iterator[None]:
        """Within the block, reductions write to ``find(key)``, or to where they wrote before where that is None."""
        before = getattr(self._optimizer, _VIEWS)
        try:
            setattr(self._optimizer, _VIEWS, _Views(before, find))
            yield
        finally:
            setattr(self._optimizer, _VIEWS, before)

    def receiving(self, receive: Callable[[int, int, Tensor], bool]) -> AbstractContextManager[None]:
        """A block in which gradients of swapped sub-groups are given to ``receive``; see ``swapped.receiving``."""
        return receiving(self._optimizer, receive) if self.stage3.swaps else contextlib.nullcontext()

    @contextlib.contextmanager
    def judging(self, values: Tensor) -> Iterator[None]:
        """Within the block, the check for overflow reads ``values`` in place of ``accumulated``."""
        before = self._optimizer.grad_partitions_flat_buffer
        try:
            self._optimizer.grad_partitions_flat_buffer = values
            yield
        finally:
            self._optimizer.grad_partitions_flat_buffer = before

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer on the host as DeepSpeed would make it."""
        from deepspeed.accelerator import get_accelerator

        made = torch.zeros(numel, dtype=dtype, device="cpu")
        return get_accelerator().pin_memory(made) if self.pins else made

    def unpin(self, buffer: Tensor) -> None:
        """Gives the memory of a buffer back that ``zeros`` or DeepSpeed made. The caller drops it."""
        from deepspeed.accelerator import get_accelerator

        if self.pins and hasattr(get_accelerator(), "unpin_memory"):
            get_accelerator().unpin_memory(buffer)

    def why_not_once(self) -> str | None:
        """Why each gradient must go to the host in fp32 too, as a reason that follows "because", or None."""
        optimizer, stage3 = self._optimizer, self.stage3
        if not getattr(optimizer, "offload_optimizer", False):
            return "the optimizer's state is not offloaded"
        if stage3.overrides_step:
            return "SuperOffload and ZenFlow handle gradients differently"
        missing = [name for name in (PARTITION_GRADS, HAS_OVERFLOW) if not hasattr(optimizer, name)]
        missing += [name for name in (_VIEWS, "grad_position", "fp16_groups") if not hasattr(optimizer, name)]
        if missing:
            return f"there is no `{missing[0]}`"
        if not updates_in_parts(stage3.cpu_optimizer):
            return f"{type(stage3.cpu_optimizer).__name__} does not update in tiles"
        if getattr(optimizer, "torch_autocast_gradscaler", None) is not None:
            return "a GradScaler reads them"
        return why_not_received(optimizer) if stage3.swaps else None


class _Views(Mapping[int, Tensor]):
    """DeepSpeed's gradients by parameter, some of them elsewhere. Nothing is copied: each bucket has one."""

    def __init__(self, before: Mapping[int, Tensor], find: Callable[[int], Tensor | None]) -> None:
        self._before, self._find = before, find

    def __getitem__(self, key: int) -> Tensor:
        found = self._find(key)
        return self._before[key] if found is None else found

    def __contains__(self, key: object) -> bool:
        return key in self._before

    def __iter__(self) -> Iterator[int]:
        return iter(self._before)

    def __len__(self) -> int:
        return len(self._before)


def computes_at_once() -> bool:
    """Whether what DeepSpeed computes on its device is over when the call returns, so that no stream orders it."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_synchronized_device())
