"""Tiles of optimizer state that stay in host memory from step to step.

Their files are out of date meanwhile. They are brought up to date, by ``Residents.flush``, before anybody reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor

from ...errors import run_all
from ...interface import HostToDeviceTransfer
from .slots import Requests, Slot, SlotMemory, Tile, bytes_for


class ResidentSlot(Slot):
    """Memory that one tile stays in: it is read once, and written when ``flush`` asks.

    Attributes:
        is_dirty: Whether it holds what its files do not.
    """

    is_resident = True

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__(memory)
        self.is_dirty = False
        self._holds = self._is_read = False

    def read(self, requests: Requests, tile: Tile) -> None:
        self.tile = tile
        if not self._holds:
            self._is_read = True
            super().read(requests, tile)

    def write(self, requests: Requests, tile: Tile) -> None:  # noqa: ARG002 - it stays
        self._holds = self.is_dirty = True

    def wait(self) -> None:
        was_read, self._is_read = self._is_read, False
        super().wait()
        self._holds = self._holds or was_read

    def start_flush(self, requests: Requests, tile: Tile) -> None:
        """Starts to write it to its files."""
        super().write(requests, tile)

    def finish_flush(self) -> None:
        """Blocks until it is written; raises as ``wait``, and stays dirty then."""
        super().wait()
        self.is_dirty = False
        self.tile = None

    def drop(self) -> None:
        """Forgets what it holds: it is read again."""
        self._holds = self.is_dirty = False


class Residents:
    """The resident tiles of one stream.

    Args:
        transfer: Page-locks the memory that the device reads.
        most_bytes: Of host memory, for all of them.
    """

    def __init__(self, transfer: HostToDeviceTransfer, most_bytes: int) -> None:
        self._transfer, self._most_bytes = transfer, most_bytes
        self._memory: SlotMemory | None = None
        self._slots: dict[tuple[int, int], ResidentSlot] = {}
        self._tiles: dict[tuple[int, int], Tile] = {}  # as the last step has seen them, with their files

    @property
    def num_bytes(self) -> int:
        """Of their memory."""
        return 0 if self._memory is None else self._memory.num_bytes

    @property
    def is_dirty(self) -> bool:
        """Whether any holds what its files do not."""
        return any(slot.is_dirty for slot in self._slots.values())

    def choose(self, tiles: Sequence[Tile], writers: Requests) -> None:
        """Takes memory for as many tiles as fit, spread evenly, so that the drive has work all the time.

        Blocks while memory is taken and page-locked, the first time.

        Args:
            tiles: All of a step.
            writers: Write what is dirty, should other tiles be chosen than before.

        Raises:
            SwapError: That cannot be written.
            Exception: What the transfer's ``prepare`` raises. No tile is resident then.
        """
        chosen = {(tile.sub_group_id, tile.offset): tile for tile in _spread(tiles, self._most_bytes)}
        if chosen.keys() != self._slots.keys():
            self.flush(writers)
            self.close()
            self._memory = SlotMemory(self._transfer, [tile.length for tile in chosen.values()])
            self._slots = dict(zip(chosen, map(ResidentSlot, self._memory.parts()), strict=True))
        elif self._memory is not None:
            self._memory.prepare()
        self._tiles = chosen

    def slot_of(self, tile: Tile) -> ResidentSlot | None:
        """The memory in which a tile stays; None for one that passes."""
        return self._slots.get((tile.sub_group_id, tile.offset))

    def release(self) -> list[Exception]:
        """Blocks until no device reads any of them; returns the errors of that."""
        errors: list[Exception] = []
        for slot in self._slots.values():
            with contextlib.suppress(Exception):
                slot.wait()
            try:
                slot.free()
            except Exception as error:  # noqa: BLE001 - the caller raises it
                errors.append(error)
        return errors

    def flush(self, writers: Requests) -> None:
        """Writes what is dirty. Blocks; everything is tried, and what fails stays dirty.

        Raises:
            SwapError: The first error of a write.
        """
        dirty = {place: slot for place, slot in self._slots.items() if slot.is_dirty}
        for place, slot in dirty.items():
            slot.start_flush(writers, self._tiles[place])
        run_all([slot.finish_flush for slot in dirty.values()])

    def drop(self) -> None:
        """Forgets what they hold: the files have got other state, or will."""
        for slot in self._slots.values():
            slot.drop()

    def close(self) -> None:
        """Gives the memory back. What was not flushed is lost. Idempotent."""
        memory, self._memory, self._slots = self._memory, None, {}
        if memory is not None:
            memory.close()


def _spread(tiles: Sequence[Tile], most_bytes: int) -> list[Tile]:
    """Tiles of at most so many bytes in all, at even distances."""
    total = sum(bytes_for(tile.length) for tile in tiles)
    share, due, held = min(most_bytes, total), 0, 0
    chosen = []
    for tile in tiles:
        size = bytes_for(tile.length)
        due += size * share  # in units of 1 / total bytes
        if due - held * total >= size * total:
            chosen.append(tile)
            held += size
    return chosen
