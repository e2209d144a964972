"""What one step needs to know, asked once at its start.

A plan lives from the start of ``step`` to its end, and belongs to one attachment. What is attached in the middle of a
step has no plan, and waits in each copy-back. What may change in the middle of a step is compared with what the plan
was made from, and asked again where it differs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..interface import HostToDeviceTransfer
from .patching import is_patched
from .stage3 import Stage3
from .tiles import can_tile, has_post_hooks


class StepPlan:
    """The plan of one step.

    Args:
        stage3: The optimizer that makes the step.
        transfer: Makes the copies.
        deferred: Whether the configuration lets copies run on to the end of the step.

    Attributes:
        swapped: The sub-groups whose state is on NVMe.
        exposed: Those whose copy no later update hides (``exposed``); empty where updates cannot be made in tiles.
        tiled: The sub-group whose copy-back was submitted while it was updated, or None.

    Raises:
        AcceleratorFailedError: The transfer's accelerator is unknown or not available here.
    """

    def __init__(self, stage3: Stage3, transfer: HostToDeviceTransfer, *, deferred: bool) -> None:
        self._stage3, self._transfer = stage3, transfer
        self._answers: dict[int, tuple[Any, bool]] = {}
        self._cpu_optimizer, loop = stage3.cpu_optimizer, stage3.loop()
        self._loop = loop if deferred and _is_known(loop) and not stage3.overrides_step else None
        self.swapped = stage3.swapped()
        self.exposed: set[int] = set()
        self.tiled: int | None = None
        if self.defers() and can_tile(self._cpu_optimizer):
            pairs = [self.partitions(each) for each in stage3.sub_groups]
            self.exposed = exposed([0 if pair is None else pair[0].numel() for pair in pairs], self.swapped)

    def partitions(self, sub_group_id: int) -> tuple[Any, Any] | None:
        """The low-precision and the master partition of a copy from host to device; None: DeepSpeed's own code runs."""
        pair = self._stage3.partitions(sub_group_id)
        if pair is None:
            return None
        destination, master = pair
        # A swapped master is in memory only for its update, and other code may move any master.
        place = (destination.device, destination.data_ptr(), master.device, master.data_ptr())
        known = self._answers.get(sub_group_id)
        if known is None or known[0] != place:
            known = self._answers[sub_group_id] = (place, self._transfer.is_host_to_device(destination, master))
        return pair if known[1] else None

    def defers(self) -> bool:
        """Whether the copies of this step may still run on to its end.

        False where code other than DeepSpeed's and ours runs in the rest of the step, such as a subclass, a wrapper or
        a hook of the optimizer: it might read or change the partitions. False once that code differs from the plan's.
        """
        return self._loop is not None and self._stage3.loop() == self._loop and not has_post_hooks(self._cpu_optimizer)


def exposed(elements: Sequence[int], swapped: Collection[int]) -> set[int]:
    """The sub-groups whose copy-back the updates that follow are too short to hide.

    On NVMe no update follows before DeepSpeed reuses the master's buffer. In memory, a copy is hidden if as many
    elements are still to be updated: their update takes longer. The last sub-groups are often small.

    Args:
        elements: How many elements of each sub-group are copied from host to device.
        swapped: The sub-groups on NVMe.
    """
    found, later = set(), 0
    for sub_group_id in reversed(range(len(elements))):
        count = elements[sub_group_id]
        if count > later or (count and sub_group_id in swapped):
            found.add(sub_group_id)
        later += count
    return found


def _is_known(loop: list[Any]) -> bool:
    """Whether each method from a copy-back to the end of the step exists and is patched; see ``Stage3.loop``."""
    return all(map(is_patched, loop[:-1]))
