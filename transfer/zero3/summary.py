"""What a process's ZeRO-3 engines were served with: lines for people, and counters for DeepSpeed's monitor.

A record stands for one transfer and keeps nothing of it alive, so it takes the counts at the end of each step. Without
``h2d run`` its first line goes to the logger ``transfer``, at level INFO, and there is no last one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import parent_process, util
from typing import Any

import torch

from ..interface import HostToDeviceTransfer
from ..routing import RoutedTransfer
from ..stats import StrategyStats, format_bytes, merged
from .attachment import Attachment
from .stage3 import LEFT, SERVED, Stage3, sites_of

#: Events are called ``Train/H2D/<strategy>/<field of StrategyStats>``.
PREFIX = "Train/H2D"

logger = logging.getLogger("transfer")


@dataclass
class Record:
    """What one transfer has done for ZeRO-3.

    Attributes:
        transfer: A weak reference to it.
        process: The id of the process in which it serves.
        is_first_rank: Whether that process is rank 0.
        asked: The copy-backs of its engines.
        served: Those of them that the transfer made.
        why_not: Why it did not make the first that it did not make.
        counts: Those of the transfer at the end of the last step.
    """

    transfer: weakref.ref[HostToDeviceTransfer]
    process: int
    is_first_rank: bool
    asked: int = 0
    served: int = 0
    why_not: str = ""
    counts: dict[str, StrategyStats] = field(default_factory=dict)
    _asked_before_step: int = 0

    def copy_back(self, stage3: Stage3, sub_group_id: int, *, served: bool) -> None:
        """Counts a copy-back."""
        self.asked += 1
        self.served += served
        if not served and not self.why_not:
            self.why_not = _why_not(stage3, sub_group_id)

    def step(self, stage3: Stage3) -> None:
        """Counts the copy-backs of a step that made them by itself, and keeps the transfer's counts."""
        if self.asked == self._asked_before_step:
            self.asked += len(stage3.sub_groups)
            self.why_not = self.why_not or _who_copies(stage3)
        self._asked_before_step = self.asked
        self.keep()

    def keep(self) -> None:
        """Keeps the transfer's counts, if it is there still."""
        transfer = self.transfer()
        if transfer is not None:
            self.counts = transfer.stats()


class _Process:
    """The records of this process, and who is told."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.by_attachment: weakref.WeakKeyDictionary[Attachment, Record] = weakref.WeakKeyDictionary()
        self.say: Callable[[str], object] = logger.info
        self.on_engine: Callable[[], object] | None = None


_process = _Process()


def speak(say: Callable[[str], object], on_engine: Callable[[], object]) -> None:
    """Has ``say`` called with each line, and ``on_engine`` when an engine is served by another transfer than before."""
    _process.say, _process.on_engine = say, on_engine


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """A block in which nothing is said when an engine is attached."""
    say, _process.say = _process.say, lambda _: None
    try:
        yield
    finally:
        _process.say = say


def of(attachment: Attachment) -> Record:
    """The record of an attachment's transfer."""
    known = _process.by_attachment.get(attachment)
    if known is None:
        same = (each for each in _process.records if each.transfer() is attachment.transfer)
        known = next(same, None) or _begin(attachment.transfer)
        _process.by_attachment[attachment] = known
    return known


def attached(optimizer: Any, attachment: Attachment) -> None:
    """Says how much of an engine is served. Rank 0 speaks."""
    stage3 = Stage3(optimizer)
    if of(attachment).is_first_rank:
        pairs = {each: attachment.partitions(stage3, each) for each in stage3.sub_groups}
        alone = [each for each, pair in pairs.items() if pair is None]
        line = f"serves {len(pairs) - len(alone)} of {len(pairs)} sub-groups of a ZeRO-3 engine"
        filled = [pair for pair in pairs.values() if pair is not None and pair[1].numel()]
        names = {_strategy(attachment.transfer, *pair) for pair in filled}
        if names:
            line += f" by {', '.join(sorted(names))}"
        line += f", {format_bytes(attachment.transfer.page_locked_bytes)} page-locked"
        if attachment.gradients is not None:
            line += f"; gradients go once, {format_bytes(attachment.gradients.saved_bytes)} given back"
        if alone:
            line += f"; left alone: {len(alone)}, as {_why_not(stage3, alone[0])}"
        sites = sites_of(stage3)
        also = [site.name for site in sites if site.answer == SERVED]
        left = [site.name for site in sites if site.answer == LEFT]
        line += f"; also {', '.join(also)}" if also else ""
        line += f"; DeepSpeed's own: {', '.join(left)}" if left else ""
        _process.say(line)


def reporter(attachment: Attachment) -> Callable[[], None]:
    """Returns a callback that writes this step's counters; call it when the step ends.

    A monitor that fails is logged, and does not end the step.
    """
    engine = attachment.engine() if attachment.engine is not None else None
    if engine is None or not getattr(engine.monitor, "enabled", False) or engine.global_rank != 0:
        return lambda: None
    before = attachment.transfer.stats()

    def report() -> None:
        try:
            events = _events(engine, before, attachment.transfer.stats())
            if events:
                engine.monitor.write_events(events)
        except Exception as error:  # noqa: BLE001 - of TensorBoard, W&B, a full disk
            logger.warning("DeepSpeed's monitor has refused what the step copied: %s", error)

    return report


def end() -> bool:
    """Says at the end of a process what was served. Rank 0 speaks, once.

    Returns:
        Whether this process had an engine.
    """
    records = [each for each in _process.records if each.process == os.getpid()]
    if any(each.is_first_rank for each in records):
        _process.say(last_line(records))
        for each in records:
            each.is_first_rank = False
    return bool(records)


def last_line(records: list[Record]) -> str:
    """The copies of several transfers as a sentence."""
    for each in records:
        each.keep()
    counts = {name: each for name, each in merged(*(each.counts for each in records)).items() if each.copies}
    asked, served = sum(each.asked for each in records), sum(each.served for each in records)
    if not asked:
        return "a ZeRO-3 engine was made, which made no step"
    line = f"served {served} of {asked} copy-backs"
    if served < asked:
        line += f": {next(each.why_not for each in records if each.why_not)}"
    if not counts:
        return line
    total = sum(counts.values(), StrategyStats())
    by_strategy = ", ".join(f"{each.copies} {name}" for name, each in counts.items())
    return (
        f"{total.copies} copies ({by_strategy}), {format_bytes(total.bytes)}, {total.wait_seconds:.2f} s waited; {line}"
    )


def _strategy(transfer: HostToDeviceTransfer, destination: Any, master: Any) -> str:
    """The strategy that would copy, as things are."""
    if isinstance(transfer, RoutedTransfer):
        return transfer.policy.select(destination, master).strategy
    return transfer.name or type(transfer).__name__


def _begin(transfer: HostToDeviceTransfer) -> Record:
    record = Record(weakref.ref(transfer), os.getpid(), _is_first_rank())
    _process.records.append(record)
    if _process.on_engine is not None:
        _process.on_engine()
        if parent_process() is not None:  # of multiprocessing: forked ones end without `atexit`
            util.Finalize(None, end, exitpriority=0)
    return record


def _is_first_rank() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def _why_not(stage3: Stage3, sub_group_id: int) -> str:
    pair = stage3.partitions(sub_group_id)
    if pair is None:
        return "the low-precision partition is offloaded, or is the master itself"
    destination, master = (each.device for each in pair)
    return f"the masters are on {master}, the low-precision partitions on {destination}"


def _who_copies(stage3: Stage3) -> str:
    if not stage3.overrides_step:
        return "the optimizer's step makes its own"
    name = "SuperOffload" if "SuperOffload" in type(stage3.optimizer).__name__ else "ZenFlow"
    return f"{name} overlaps its own"


def _events(
    engine: Any, before: dict[str, StrategyStats], after: dict[str, StrategyStats]
) -> list[tuple[str, float, int]]:
    # The engine counts a step's samples after the optimizer's step, in the middle of which this is called.
    samples = engine.global_samples + engine.train_batch_size()
    events = []
    for name, total in after.items():
        of_step = total - before.get(name, StrategyStats())
        if of_step.copies or of_step.passed_on:
            events += [(f"{PREFIX}/{name}/{field}", value, samples) for field, value in asdict(of_step).items()]
    return events
