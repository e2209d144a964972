"""The counters of each step for DeepSpeed's monitor: TensorBoard, W&B, Comet, CSV."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..stats import StrategyStats
from .attachment import Attachment

#: Events are called ``Train/H2D/<strategy>/<field of StrategyStats>``.
PREFIX = "Train/H2D"

logger = logging.getLogger("transfer")


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
