"""What one step needs to know, asked once at its start.

A plan lives from the start of ``step`` to its end, and belongs to one attachment. What is attached in the middle of a
step has no plan, and waits in each copy-back. What may change in the middle of a step is compared with what the plan
was made from, and asked again where it differs.
"""

from __future__ import annotations

from typing import Any

from ..interface import HostToDeviceTransfer
from .known_code import step_hooks, unknown_everywhere, unknown_in
from .patching import is_patched
from .stage3 import COPY_BACK, POST_STEP, RELEASE, UPDATE, Stage3, moved, unread_version, updates_in_parts


class StepPlan:
    """The plan of one step.

    Args:
        stage3: The optimizer that makes the step.
        transfer: Makes the copies.
        deferred: Whether the configuration lets copies run on to the end of the step.

    Attributes:
        waits_because: Why each copy-back of this step waits, as far as was known at its start; None where they do not.
        swapped: The sub-groups whose state is on NVMe.
        in_tiles: Whether the optimizer on the host updates in tiles.
        passes: Whether the state of the swapped ones passes through in tiles; None until the first of them is prepared.

    Raises:
        AcceleratorFailedError: The transfer's accelerator is unknown or not available here.
    """

    def __init__(self, stage3: Stage3, transfer: HostToDeviceTransfer, *, deferred: bool) -> None:
        self._stage3, self._transfer = stage3, transfer
        self._answers: dict[int, tuple[Any, bool]] = {}
        self.waits_because = why_wait(stage3, deferred=deferred)
        self.swapped = stage3.swapped()
        in_tiles = self.waits_because is None and not stage3.overrides_step
        self.in_tiles = in_tiles and updates_in_parts(stage3.cpu_optimizer)
        self.passes: bool | None = None
        self._tiled: tuple[int, Any] | None = None  # what was copied in tiles, and from where to where

    def partitions(self, sub_group_id: int) -> tuple[Any, Any] | None:
        """The low-precision and the master partition of a copy from host to device; None: DeepSpeed's own code runs."""
        pair = self._stage3.partitions(sub_group_id)
        if pair is None:
            return None
        destination, master = pair
        # A swapped master is in memory only for its update, and other code may move any master.
        place = _place(destination, master)
        known = self._answers.get(sub_group_id)
        if known is None or known[0] != place:
            known = self._answers[sub_group_id] = (place, self._transfer.is_host_to_device(destination, master))
        return pair if known[1] else None

    def is_passing(self, sub_group_id: int) -> bool:
        """Whether the state of this sub-group passes from files through the step."""
        return bool(self.passes) and sub_group_id in self.swapped

    def tile(self, sub_group_id: int, partitions: tuple[Any, Any]) -> None:
        """Notes that tiles of a sub-group's copy-back were submitted while it was updated."""
        self._tiled = (sub_group_id, _place(*partitions))

    def take_tiled(self, sub_group_id: int) -> bool:
        """Whether all of this sub-group was copied in tiles, and nothing has moved since. False when asked again."""
        tiled, self._tiled = self._tiled, None
        partitions = self.tile_partitions(sub_group_id) if tiled is not None and tiled[0] == sub_group_id else None
        return tiled is not None and partitions is not None and tiled[1] == _place(*partitions)

    def tile_partitions(self, sub_group_id: int) -> tuple[Any, Any] | None:
        """As ``partitions``, and where both are on the host: a tile is copied while it is in the caches."""
        pair = self._stage3.plain_partitions(sub_group_id)
        if pair is None or all(map(self._transfer.accelerator.on_host, pair)):
            return None if pair is None or sub_group_id in self.swapped else pair
        return self.partitions(sub_group_id)

    def defers(self) -> bool:
        """Whether the copies of this step may still run on to its end: ``why_wait``, asked again.

        False from the first answer on that said so.
        """
        if self.waits_because is None:
            self.waits_because = why_wait(self._stage3, deferred=True)
        return self.waits_because is None


def _place(destination: Any, master: Any) -> tuple[Any, int, Any, int]:
    return destination.device, destination.data_ptr(), master.device, master.data_ptr()


def why_wait(stage3: Stage3, *, deferred: bool) -> str | None:
    """Why copies must not run on behind the rest of a step, as a reason that follows "because", or None.

    See ``StepPlan`` for ``deferred``.

    They may only where each method that the patches rely on is there, is of a version of DeepSpeed that was read, and
    has our patch; and where all code that runs up to the end of the step is DeepSpeed's, torch's or ours. Other code,
    such as a subclass, a wrapper, a replaced method or a hook, might read or change the partitions.
    """
    if not deferred:
        return "the configuration says `completion: immediate`"
    missing, _ = moved(stage3.optimizer)
    if missing:
        return f"there is no `{missing[0]}`"
    if stage3.is_zenflow:
        return "ZenFlow orders a step differently"
    unread = unread_version(superoffload=stage3.is_superoffload)
    if unread is not None:
        return unread
    updaters = stage3.updaters()
    asked = (*map(unknown_in, (*stage3.helpers(), *updaters)), *map(step_hooks, updaters), unknown_everywhere())
    unknown = next((each for each in asked if each is not None), None)
    if unknown is not None:
        return f"{unknown}, may read or change partitions"
    for name in (UPDATE, COPY_BACK, RELEASE, POST_STEP):
        if not is_patched(getattr(type(stage3.optimizer), name)):
            return f"`{name}` is DeepSpeed's own again"
    return None
