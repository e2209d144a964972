"""The steps of one engine, by turns."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from ... import zero3
from ...errors import TransferError
from ...zero3 import finding, summary
from ...zero3.attachments import attachments
from ...zero3.stage3 import Stage3, is_zero3
from ..bench_zero3.on_nvme import masters
from ..measuring.bits import same_bits
from ..measuring.ranks import Ranks
from .turns import DEEPSPEED, OURS, Turn, turns

#: One counted step: its way, its pair, seconds of the step and of the iteration.
Counted = tuple[str, int, float, float]


class Comparison:
    """Takes the steps of the first ZeRO-3 engine that makes one; those of others are as they are.

    Between the steps it changes the engine, compares bits and waits for the device; none of this is in a time. Every
    rank does the same, step by step, so that collectives meet. In its turns, DeepSpeed's own code copies from masters
    where this package has moved them: ordinary memory then, in huge pages where the system has them.

    Args:
        steps: To count of each way.
        say: Writes a line for people, on rank 0.
        file: For the result as JSON, or None.
    """

    def __init__(self, steps: int, say: Callable[[str], object], file: str | None) -> None:
        self._turns, self._steps, self._say, self._file = turns(steps), steps, say, file
        self._at = 0
        self._engine: weakref.ref[Any] | None = None
        self._transfer: Any = None
        self._counted: list[Counted] = []
        self._compared, self._sub_groups, self._differ = 0, 0, 0
        self._not_compared: str | None = None
        self._failed: str | None = None
        self._began: float | None = None
        self._over = False
        self._process = os.getpid()

    def step(self, engine: Any, original: Callable[[], Any]) -> Any:
        """Makes one step of an engine, which ``original`` does; what it raises is raised."""
        if self._over or not self._is_ours(engine) or not engine.is_gradient_accumulation_boundary():
            return original()
        turn, skipped = self._turns[self._at], getattr(engine, "skipped_steps", 0)
        self._synchronize()
        began = time.perf_counter()
        result = original()
        self._synchronize()
        ended = time.perf_counter()
        if getattr(engine, "skipped_steps", 0) == skipped:  # else the loss scale was too large, and nothing was updated
            if turn.pair is not None and self._began is not None and self._failed is None:
                self._counted.append((turn.way, turn.pair, ended - began, ended - self._began))
                self._compare_bits(engine)
            self._at += 1
            self._go_on(engine, turn)
        self._began = time.perf_counter()
        return result

    def _is_ours(self, engine: Any) -> bool:
        if self._engine is None:
            optimizer = finding.find(engine, is_zero3)
            if optimizer is None:
                return False
            self._begin(engine, optimizer)
        return self._engine is not None and self._engine() is engine

    def _begin(self, engine: Any, optimizer: Any) -> None:
        current = attachments.get(optimizer)  # the script may have attached it, with a configuration of its own
        try:
            self._transfer = zero3.attach(engine) if current is None else current.transfer
        except TransferError as error:
            self._failed = str(error)
        self._engine = weakref.ref(engine)
        self._say(
            f"compares {self._steps} steps of each way, in {len(self._turns)} steps of the script: DeepSpeed alone, "
            "and with this package"
        )
        atexit.register(self._at_exit)

    def _go_on(self, engine: Any, turn: Turn) -> None:
        """Ends the comparison after its last step, and changes the engine for the next one; it ends attached."""
        self._over = self._at == len(self._turns)
        if self._over:
            self._tell(_ranks())
        following = OURS if self._over else self._turns[self._at].way
        if following != turn.way and self._failed is None:
            try:
                self._change(engine, following)
            except TransferError as error:  # such as memory that the system does not page-lock again
                self._failed = str(
                    error
                )  # this rank makes its steps all the same, as the others wait for it at the end
                if self._over:
                    self._say(f"the script goes on with DeepSpeed alone: {error}")

    def _synchronize(self) -> None:
        if self._transfer is not None:
            self._transfer.accelerator.synchronize()

    def _change(self, engine: Any, way: str) -> None:
        with summary.silence():
            if way == DEEPSPEED:
                zero3.detach(engine)
            else:
                zero3.attach(engine, self._transfer)

    def _compare_bits(self, engine: Any) -> None:
        """Compares each low-precision partition of this rank with torch's cast of its master on the host."""
        optimizer = finding.find(engine, is_zero3)
        view = Stage3(optimizer)
        try:
            for sub_group_id, master in enumerate(masters(optimizer)):
                partition = view.low_precision(sub_group_id)
                if partition is not None:  # else it is in a file
                    self._sub_groups += 1
                    self._differ += not same_bits(partition, master.detach())
        except Exception as error:  # noqa: BLE001 - a comparison ends no training
            self._not_compared = f"{type(error).__name__}: {error}"
        self._compared += 1

    def _tell(self, ranks: Ranks) -> None:
        from . import report

        failures = [each for each in ranks.gather(self._failed) if each is not None]
        if failures:
            self._say(f"cannot compare, and the script goes on with DeepSpeed alone where that failed: {failures[0]}")
            return
        own = {
            "counted": self._counted,
            "compared_steps": self._compared,
            "compared_partitions": self._sub_groups,
            "partitions_that_differ": self._differ,
            "not_compared": self._not_compared,
        }
        every = ranks.gather(own)
        if ranks.rank == 0:
            report.tell(report.make(every, self._transfer.accelerator), self._say, self._file)

    def _at_exit(self) -> None:
        """Tells what there is where the script has ended too early: of this rank, as others may be gone."""
        if self._over or os.getpid() != self._process or _rank() != 0:
            return
        pairs = {way: {pair for found, pair, *_ in self._counted if found == way} for way in (OURS, DEEPSPEED)}
        made = f"the script has made {self._at} of the {len(self._turns)} steps that --compare {self._steps} takes"
        whole = pairs[OURS] & pairs[DEEPSPEED]
        self._say(f"{made}: {'of this rank alone:' if whole else 'nothing can be compared'}")
        if whole:
            self._counted = [each for each in self._counted if each[1] in whole]
            self._tell(Ranks())


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _ranks() -> Ranks:
    import torch.distributed as group

    if not (group.is_available() and group.is_initialized()):
        return Ranks()
    return Ranks(group.get_rank(), group.get_world_size())
