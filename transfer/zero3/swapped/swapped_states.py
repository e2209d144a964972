"""The sub-groups of one ZeRO-3 optimizer whose state passes from DeepSpeed's files through a stream, and back.

DeepSpeed reads a whole sub-group, updates it, and writes it, one thing after the other. Here its own swapping is left
out of a step. Names, places and layout of the files stay, and between steps they hold everything: whoever reads or
writes them then, as checkpoints do, needs to know of nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...config import Zero3Config
from ...errors import TransferError, run_all
from ...interface import HostToDeviceTransfer
from ...stats import format_bytes
from .. import tiles
from ..stage3 import Stage3, SwappedState
from . import scratch
from .file_stream import FileStream, Submit
from .slots import Tile, bytes_for
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
        self._config: Zero3Config = getattr(transfer.config, "zero3", None) or Zero3Config()
        self._stream: FileStream | None = None
        self._files: dict[int, list[StateFile]] = {}
        self._marked: Path | None = None
        self.tiles = tiles.TileStream(MOST_ELEMENTS)

    def claim(self, stage3: Stage3) -> None:
        """Marks DeepSpeed's folder of swap files, if there is one, as in use. Idempotent; ``close`` undoes it.

        Raises:
            SwapError: Another process uses it.
        """
        folder = stage3.folder_of_files
        if folder is not None and self._marked is None:
            scratch.mark(folder)
            self._marked = folder

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
            TransferError: See ``FileStream.begin``; or other code has written files whose state is in memory.
        """
        paths = {each: SwappedState(stage3, each).files() for each in destinations}
        if not destinations or not all(paths.values()):
            return False
        sample = torch.empty(1, dtype=torch.float32, device="cpu")
        if not all(self._transfer.is_host_to_device(each.narrow(0, 0, 1), sample) for each in destinations.values()):
            return False
        self._check_files()
        for sub_group_id, destination in destinations.items():
            self._open(sub_group_id, paths[sub_group_id] or [], 4 * destination.numel())
        is_new, stream = self._stream is None, self._stream or self._make_stream(destinations.values())
        self._stream = stream
        stream.begin(
            [
                Tile(sub_group_id, offset, length, self._files[sub_group_id], offset + length == destination.numel())
                for sub_group_id, destination in destinations.items()
                for offset, length in tiles.plan_tiles(destination.numel(), self.tiles.tile_elements)
            ]
        )
        if is_new:
            logger.info(
                "optimizer state of %d sub-groups in files passes through a step in tiles of %d elements: %s of host "
                "memory, of which %s hold state from step to step; `pipeline_read`, `pipeline_write` and "
                "`buffer_count` are not used for that",
                len(destinations),
                self.tiles.tile_elements,
                format_bytes(stream.num_bytes),
                format_bytes(stream.resident_bytes),
            )
        return True

    def _make_stream(self, destinations: Collection[Tensor]) -> FileStream:
        largest = max(each.numel() for each in destinations)
        all_bytes = sum(bytes_for(each.numel()) for each in destinations)
        resident_bytes = self._config.host_memory or 0
        most = largest if resident_bytes >= all_bytes else MOST_ELEMENTS  # else many are in memory once more
        elements = tiles.aligned(min(tiles.tile_elements(self._transfer), most, max(largest, 1)))
        profile = tiles.profile_of(self._transfer)
        self.tiles = tiles.TileStream(elements)
        return FileStream(self._transfer, elements, None if profile is None else profile.drive, resident_bytes)

    def tiles_of(self, sub_group_id: int, submit: Submit) -> FileTiles | None:
        """The tiles of one sub-group, which is the next one of the step; None without a step that has begun."""
        return None if self._stream is None else FileTiles(self._stream, sub_group_id, submit)

    def settle(self) -> None:
        """Blocks until what passes is in the files. Idempotent; raises as ``FileStream.settle``."""
        if self._stream is not None:
            with self._writing():
                self._stream.settle()

    def check(self) -> None:
        """Settles; raises also where an earlier step has updated a part of the state; see ``FileStream.check``.

        Raises:
            TransferError: Also where other code has written files whose state is in memory, and newer there.
        """
        if self._stream is not None:
            self._check_files()
            with self._writing():
                self._stream.check()

    def flush(self) -> None:
        """Blocks until the files hold everything. Idempotent; raises as ``check``, and the first error of a write."""
        self.check()
        if self._stream is not None:
            with self._writing():
                self._stream.flush()

    def let_go(self) -> None:
        """Flushes, and holds nothing any more: somebody is about to read the files, and may write them."""
        self.flush()
        if self._stream is not None:
            self._stream.drop()

    def forget(self) -> bool:
        """What was left unwritten is void, as the files have got other state; see ``FileStream.forget``. Blocks."""
        return self._stream is not None and self._stream.forget()

    def close(self) -> None:
        """Flushes, and gives everything back. Idempotent; raises as ``FileStream.close`` and ``check``."""
        checks: list[Callable[[], None]] = [] if self._stream is None else [self._drop_what_is_void, self._stream.close]
        marked, self._marked = self._marked, None
        closes = [file.close for files in self._files.values() for file in files]
        if marked is not None:
            closes.append(functools.partial(scratch.unmark, marked))
        try:
            run_all([*checks, *closes])
        finally:
            self._stream, self._files = None, {}

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A block that writes files; afterwards, it is remembered when that was, so that other writers are noticed."""
        try:
            yield
        finally:
            if self._stream is not None and self._stream.resident_bytes:
                for file in (file for files in self._files.values() for file in files):
                    file.note()

    def _drop_what_is_void(self) -> None:
        try:
            self._check_files()
        except TransferError:
            if self._stream is not None:
                self._stream.drop()
            raise

    def _check_files(self) -> None:
        """What stays in memory is void where other code has written its files; where it is newer, that is an error."""
        if self._stream is None or not self._stream.resident_bytes:
            return
        changed = [file for files in self._files.values() for file in files if not file.is_as_noted]
        if changed and self._stream.is_dirty:
            raise TransferError(
                f"{changed[0].path} was written by other code, while newer state was in host memory: load a checkpoint"
            )
        if changed:
            self._stream.drop()

    def _open(self, sub_group_id: int, paths: list[str], num_bytes: int) -> None:
        """Opens files that are not open yet, or that others have replaced."""
        files = self._files.get(sub_group_id, [])
        if [str(file.path) for file in files] == paths and all(file.is_there for file in files):
            return
        run_all([file.close for file in self._files.pop(sub_group_id, [])])
        scratch.spread(paths, len(paths) * sub_group_id, self._config.paths)
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
