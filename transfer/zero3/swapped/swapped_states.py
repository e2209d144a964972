"""The sub-groups of one ZeRO-3 optimizer whose state passes from DeepSpeed's files through a stream, and back.

DeepSpeed reads a whole sub-group, updates it, and writes it, one thing after the other. Here its own swapping is left
out of a step. Names, places and layout of the files stay, and between steps they hold everything: whoever reads or
writes them then, as checkpoints do, needs to know of nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import run_all
from ...interface import HostToDeviceTransfer
from ...stats import format_bytes
from .. import tiles
from ..stage3 import Stage3, SwappedState
from .file_stream import FileStream, Submit
from .slots import Tile
from .state_file import StateFile

logger = logging.getLogger("transfer")

#: The most elements of a tile, whose state has 12 MiB. On a virtual drive, 1.2 times as fast as twice as many, with as
#: much memory in all; half as many were slower too.
MOST_ELEMENTS = 2**20


class SwappedStates:
    """The swapped sub-groups of an optimizer, while one transfer serves them.

    Args:
        transfer: Page-locks the memory that the device reads.
    """

    def __init__(self, transfer: HostToDeviceTransfer) -> None:
        self._transfer = transfer
        self._stream: FileStream | None = None
        self._files: dict[int, list[StateFile]] = {}
        self.tiles = tiles.TileStream(MOST_ELEMENTS)

    def begin(self, stage3: Stage3, destinations: Mapping[int, Tensor]) -> bool:
        """Starts to read the state of a step.

        Args:
            stage3: The optimizer.
            destinations: The low-precision partition of every swapped sub-group, by number, in the order of the step.

        Returns:
            False where DeepSpeed's own code is to swap: the state is not in files yet, or is no master and two moments
            of Adam, or copies would not go from host to device.

        Raises:
            SwapError: The files cannot be opened, have no room on the drive, or what an earlier step has left unwritten
                cannot be written. Nothing was updated.
            TransferError: See ``FileStream.begin``.
        """
        paths = {each: SwappedState(stage3, each).files() for each in destinations}
        if not destinations or not all(paths.values()):
            return False
        sample = torch.empty(1)
        if not all(self._transfer.is_host_to_device(each.narrow(0, 0, 1), sample) for each in destinations.values()):
            return False
        if self._stream is None:
            largest = max(each.numel() for each in destinations.values())
            elements = tiles.aligned(min(tiles.tile_elements(self._transfer), MOST_ELEMENTS, max(largest, 1)))
            profile = tiles.profile_of(self._transfer)
            self.tiles = tiles.TileStream(elements)
            self._stream = FileStream(self._transfer, elements, None if profile is None else profile.drive)
            logger.info(
                "optimizer state of %d sub-groups in files passes through a step in tiles of %d elements: %s of host "
                "memory; `pipeline_read`, `pipeline_write` and `buffer_count` are not used for that",
                len(destinations),
                elements,
                format_bytes(self._stream.num_bytes),
            )
        for sub_group_id, destination in destinations.items():
            self._open(sub_group_id, paths[sub_group_id] or [], 4 * destination.numel())
        self._stream.begin(
            Tile(sub_group_id, offset, length, self._files[sub_group_id], offset + length == destination.numel())
            for sub_group_id, destination in destinations.items()
            for offset, length in tiles.plan_tiles(destination.numel(), self.tiles.tile_elements)
        )
        return True

    def tiles_of(self, sub_group_id: int, submit: Submit) -> FileTiles | None:
        """The tiles of one sub-group, which is the next one of the step; None without a step that has begun."""
        return None if self._stream is None else FileTiles(self._stream, sub_group_id, submit)

    def settle(self) -> None:
        """Blocks until the files hold everything. Idempotent; raises as ``FileStream.settle``."""
        if self._stream is not None:
            self._stream.settle()

    def check(self) -> None:
        """Settles; raises also where an earlier step has updated a part of the state; see ``FileStream.begin``."""
        if self._stream is not None:
            self._stream.begin(())

    def forget(self) -> bool:
        """What was left unwritten is void, as the files have got other state; see ``FileStream.forget``. Blocks."""
        return self._stream is not None and self._stream.forget()

    def close(self) -> None:
        """Settles, and gives everything back. Idempotent; raises as ``FileStream.close``."""
        stream, self._stream = self._stream, None
        files, self._files = self._files, {}
        closes: list[Any] = [] if stream is None else [stream.close]
        run_all([*closes, *(file.close for each in files.values() for file in each)])

    def _open(self, sub_group_id: int, paths: list[str], num_bytes: int) -> None:
        """Opens files that are not open yet, or that others have replaced."""
        files = self._files.get(sub_group_id, [])
        if [str(file.path) for file in files] == paths and all(file.is_there for file in files):
            return
        run_all([file.close for file in self._files.pop(sub_group_id, [])])
        opened = self._files[sub_group_id] = []
        try:
            opened.extend(StateFile(path, num_bytes) for path in paths)
        except BaseException:
            run_all([file.close for file in self._files.pop(sub_group_id)])
            raise


class FileTiles:
    """State that is in files; see ``tiles.Tiles``.

    Args:
        stream: Reads and writes it.
        sub_group_id: Whose it is.
        submit: Starts a copy to the device.
    """

    def __init__(self, stream: FileStream, sub_group_id: int, submit: Submit) -> None:
        self._stream, self._sub_group_id, self._submit = stream, sub_group_id, submit

    def take(self, offset: int, length: int) -> tuple[Tensor, ...]:  # noqa: ARG002 - the stream knows
        return self._stream.take(self._sub_group_id, offset)

    def updated(self, offset: int, length: int, *, copy: bool) -> None:  # noqa: ARG002
        self._stream.updated(self._submit if copy else None)
