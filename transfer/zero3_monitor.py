"""What a step's copies did, for DeepSpeed's monitor: TensorBoard, W&B, Comet and CSV show it as they show the loss."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .stats import StrategyStats

#: Events are called ``Train/H2D/<strategy>/<field of StrategyStats>``.
PREFIX = "Train/H2D"


def enabled(engine: Any) -> bool:
    """Whether this engine's monitor writes anything from this rank."""
    return bool(getattr(getattr(engine, "monitor", None), "enabled", False)) and engine.global_rank == 0


def write_step(engine: Any, before: dict[str, StrategyStats], after: dict[str, StrategyStats]) -> None:
    """Writes the difference between two counts, at the sample to which DeepSpeed counts this step."""
    # The engine counts a step's samples after the optimizer's step, in the middle of which this is called.
    samples = engine.global_samples + engine.train_batch_size()
    events = []
    for name, total in after.items():
        of_step = total - before.get(name, StrategyStats())
        if of_step.copies or of_step.passed_on:
            events += [(f"{PREFIX}/{name}/{field}", value, samples) for field, value in asdict(of_step).items()]
    if events:
        engine.monitor.write_events(events)
