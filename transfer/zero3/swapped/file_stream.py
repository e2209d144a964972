"""The optimizer state of a step, from files and back: reads run ahead of the updates, writes behind.

One stream of tiles over all sub-groups. While one is updated, the next ones are read, those before it are written, and
the device reads their masters, all at once. The thread that makes the step starts everything; threads of two pools read
and write. Nothing of it runs between steps. Some tiles may stay in memory (``residents``): they are neither read nor
written in a step.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from torch import Tensor

from ...errors import SwapError, TransferError, run_all
from ...in_flight import InFlightCopy
from ...interface import HostToDeviceTransfer
from ...measured.profile import Drive, DriveRate
from .residents import Residents
from .slots import Requests, Slot, SlotMemory, Tile

logger = logging.getLogger("transfer")

#: Tiles in memory at once: one is updated, the others are read or written.
SLOTS = 8
#: How files are read and written, where the machine's profile does not tell.
THREADS, REQUEST_BYTES = 4, 2**22

#: Starts the copy to the device of a range of a sub-group's master: begin, elements, and where the values are.
Submit = Callable[[int, int, Tensor], InFlightCopy | None]


class FileStream:
    """Reads and writes tiles of state in order.

    Args:
        transfer: Page-locks the memory that the device reads.
        tile_elements: Of the largest tile.
        drive: Of the machine's profile: threads and sizes of requests.
        resident_bytes: Of host memory that tiles stay in from step to step.
    """

    def __init__(
        self, transfer: HostToDeviceTransfer, tile_elements: int, drive: Drive | None = None, resident_bytes: int = 0
    ) -> None:
        self._transfer, self._tile_elements = transfer, tile_elements
        self._memory: SlotMemory | None = None  # taken by the first step in which a tile passes
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._residents = Residents(transfer, resident_bytes)
        self._coming: deque[Tile] = deque()
        self._read: deque[Slot] = deque()
        self._current: Slot | None = None
        self._written: deque[Slot] = deque()
        self._unwritten: list[Slot] = []  # what could not be written: the only good copy of that state
        self._updating: int | None = None  # the sub-group of which not all is updated, though the step is counted
        self._torn: str | None = None
        rates = (None, None) if drive is None else _rates(drive)
        self._readers, self._writers = (
            Requests(THREADS, REQUEST_BYTES) if rate is None else Requests(rate.threads, rate.request_bytes)
            for rate in rates
        )

    @property
    def num_bytes(self) -> int:
        """Of its memory."""
        return self._residents.num_bytes + (0 if self._memory is None else self._memory.num_bytes)

    @property
    def resident_bytes(self) -> int:
        """Of the memory that tiles stay in."""
        return self._residents.num_bytes

    @property
    def is_dirty(self) -> bool:
        """Whether memory holds state that files do not, between steps."""
        return bool(self._unwritten) or self._residents.is_dirty

    def begin(self, tiles: Sequence[Tile]) -> None:
        """Starts to read the tiles of a step, in order. What an earlier step has left unwritten is written first.

        The first time, blocks while memory is taken and page-locked.

        Raises:
            SwapError: It still cannot be written.
            TransferError: An earlier step ended in the middle of a sub-group. A checkpoint must be loaded.
            Exception: What the transfer's ``prepare`` raises. Nothing has begun then.
        """
        self.check()
        if not tiles:
            return
        self._residents.choose(tiles, self._writers)
        if self._memory is None and any(self._residents.slot_of(tile) is None for tile in tiles):
            self._memory = SlotMemory(self._transfer, [self._tile_elements] * SLOTS)
            self._slots = list(map(Slot, self._memory.parts()))
            self._free = list(self._slots)
        elif self._memory is not None:
            self._memory.prepare()
        self._coming.extend(tiles)
        self._advance()

    def check(self) -> None:
        """Settles. Raises also where an earlier step ended in the middle of a sub-group; see ``begin``."""
        self.settle()
        if self._torn is not None:
            raise TransferError(self._torn)

    def flush(self) -> None:
        """Blocks until files hold everything.

        Raises:
            SwapError: The first error of a write. What could not be written stays in memory, and is tried again.
        """
        self.settle()
        self._residents.flush(self._writers)

    def drop(self) -> None:
        """State that stays in memory is read anew in the next step: others have written files, or will."""
        self._residents.drop()

    def take(self, sub_group_id: int, offset: int) -> tuple[Tensor, ...]:
        """Master, first and second moments of the next tile. Blocks until they are in memory.

        Raises:
            SwapError: They cannot be read. Nothing of the tile is lost; it is the next one still. Where the stream
                settles before all of the sub-group is updated, it wants a checkpoint.
            TransferError: It is not the next one.
        """
        self._updating = sub_group_id
        if self._current is None:
            if not self._read and not self._coming:
                raise TransferError(f"there is no tile to take, of sub-group {sub_group_id} at element {offset}")
            if not self._read:
                self._start(self._residents.slot_of(self._coming[0]) or self._next_free())
            self._current = self._read[0]
        if self._read and self._read[0] is self._current:
            self._read.popleft()
        slot, tile = self._current, self._current.tile
        if tile is None or (tile.sub_group_id, tile.offset) != (sub_group_id, offset):
            raise TransferError(f"element {offset} of sub-group {sub_group_id} is not the next, which is {tile}")
        try:
            while self._coming and self._written and slot.requests_left:
                # Whatever ends first: a slot that was written is read into at once.
                wait({*slot.requests_left, *self._written[0].requests_left}, return_when=FIRST_COMPLETED)
                self._advance()
            slot.wait()
        except BaseException:
            with contextlib.suppress(Exception):
                slot.wait()
            slot.read(self._readers, tile)  # again, for whoever asks again
            raise
        state = tuple(tensor.narrow(0, 0, tile.length) for tensor in slot.tensors)
        self._advance()
        return state

    def updated(self, submit: Submit | None) -> None:
        """Starts to write the tile that was taken last, and to copy it, if ``submit`` is given. Idempotent."""
        slot = self._current
        if slot is None or slot.tile is None:
            return
        # Until all requests have been made it is the current one: whoever was interrupted comes again.
        tile = slot.tile
        if slot not in self._written:
            self._written.append(slot)
        slot.write(self._writers, tile)
        if tile.is_last:
            self._updating = None
        self._current = None
        if submit is not None:
            slot.copy = submit(tile.offset, tile.length, slot.tensors[0].narrow(0, 0, tile.length))
        self._advance()

    def settle(self) -> None:
        """Blocks until what passes is written, and no device reads it; tiles that were not updated are forgotten.

        What could not be written stays in memory, and is tried again.

        Raises:
            SwapError: The first error of a write.
        """
        if self._updating is not None:
            self._torn = (
                f"a step ended in the middle of sub-group {self._updating}, whose state is in files: load a checkpoint"
            )
            self._updating = None
        self._coming.clear()
        self._write_again()
        for slot in self._slots:
            if slot not in self._written:
                with contextlib.suppress(Exception):
                    slot.wait()
                slot.free()
        self._read.clear()
        self._current = None
        errors = []
        while self._written:
            try:
                self._leave()
            except Exception as error:  # noqa: BLE001, PERF203 - it is raised below
                errors.append(error)
        errors += self._residents.release()
        self._free = [slot for slot in self._slots if slot not in self._unwritten]
        if errors:
            raise errors[0]

    def forget(self) -> bool:
        """Settles, but drops what could not be written: the files have got other state. Blocks.

        Returns:
            Whether a step had ended in the middle of a sub-group.
        """
        self._unwritten.clear()
        self.settle()
        self._residents.drop()
        was_torn, self._torn = self._torn is not None, None
        return was_torn

    def close(self) -> None:
        """Flushes, and gives everything back. Idempotent.

        Raises:
            SwapError: State could not be written: it is lost.
        """
        if self._torn is not None:
            logger.warning("optimizer state in files is left as it is, though %s", self._torn)
        memory, self._memory = self._memory, None
        try:
            run_all([self.flush, *([] if memory is None else [memory.close]), self._residents.close])
        finally:
            self._slots, self._free = [], []
            run_all([self._readers.close, self._writers.close])

    def _advance(self) -> None:
        """Starts as many reads as there are slots for, without waiting."""
        while self._written and self._written[0].is_idle:
            with contextlib.suppress(SwapError):  # it is raised when the stream settles
                self._leave()
        while self._coming:
            slot = self._residents.slot_of(self._coming[0])
            if slot is None and not self._free:
                return
            self._start(slot or self._free.pop())

    def _start(self, slot: Slot) -> None:
        slot.read(self._readers, self._coming.popleft())
        self._read.append(slot)

    def _next_free(self) -> Slot:
        """Blocks until a slot is free. Raises the error of a write where no slot could be written."""
        if not self._free and not self._written:
            self._write_again()
        while not self._free:
            try:
                self._leave()
            except SwapError:  # noqa: PERF203 - the others may be written
                if not self._written:
                    raise
        return self._free.pop()

    def _write_again(self) -> None:
        again, self._unwritten = self._unwritten, []
        self._written.extend(again)
        for slot in again:
            if slot.tile is not None:
                slot.write(self._writers, slot.tile)

    def _leave(self) -> None:
        """Blocks until the tile that was updated first is written and copied; its slot is free then."""
        slot = self._written[0]
        try:
            slot.wait()
        except SwapError:
            self._unwritten.append(self._written.popleft())
            raise
        slot.free()
        self._written.popleft()
        if not slot.is_resident:
            self._free.append(slot)


def _rates(drive: Drive) -> tuple[DriveRate, DriveRate]:
    """Those of reading and of writing: at once, as far as that was measured."""
    mixed = drive.best_mixed
    return (drive.best_read, drive.best_write) if mixed is None else (mixed, mixed)
