"""One rank of ``h2d demo``."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from accelerators.overlap import bytes_of

from ...accelerator_choice import AcceleratorChoice
from ...zero3 import attach
from ..bench_zero3.engine import make_engine, start_deepspeed
from ..measuring.hardware import describe
from ..measuring.progress import progress
from ..measuring.ranks import Ranks

OURS = "host-to-device-transfer"
ALONE = "DeepSpeed alone"

_CONTEXT = 32
_BATCH = 2
#: Small enough for a host that computes in bf16 without instructions for it; partitions of more than 1 MiB.
_MODEL = {"layers": 2, "hidden": 384, "sub_groups": 3, "batch": _BATCH, "nvme": None, "nvme_pipeline": False}
_LEARNING_RATE = 1e-3


def train_twice(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Trains with this package, then under DeepSpeed alone, and compares the weights: a worker for ``ranks.launch``.

    Returns:
        ``hardware``; ``runs``, of which the first is ours; ``elements`` of the model; and
        ``elements_that_differ``, the most that a rank has found.
    """
    # On a GPU, some backward passes add in an order that differs from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    accelerator = AcceleratorChoice(options["accelerator"]).resolve()
    start_deepspeed(accelerator)
    with progress(2 * options["steps"], visible=ranks.rank == 0) as advance:
        ours, weights = _train(options, accelerator, ranks, advance, attached=True)
        alone, expected = _train(options, accelerator, ranks, advance, attached=False)
    differing = sum(map(elements_that_differ, weights, expected))
    return {
        "hardware": describe(accelerator),
        "runs": [ours, alone],
        "elements": sum(weight.numel() for weight in expected),
        "elements_that_differ": max(ranks.gather(differing)),
    }


def elements_that_differ(found: Tensor, expected: Tensor) -> int:
    """How many elements of two contiguous tensors of one dtype and shape differ in some bit."""
    different = bytes_of(found) != bytes_of(expected)
    return int(different.view(-1, found.element_size()).any(dim=1).sum())


def _train(
    options: Mapping[str, Any], accelerator: Any, ranks: Ranks, advance: Callable[[str], None], *, attached: bool
) -> tuple[dict[str, Any], list[Tensor]]:
    """One run and the weights that it ends with, on the host."""
    import deepspeed

    torch.manual_seed(0)
    name = OURS if attached else ALONE
    settings = {**_MODEL, "optimizer": options["optimizer"], "learning_rate": _LEARNING_RATE}
    engine = make_engine(settings, accelerator)
    try:
        transfer = attach(engine, options["config"]) if attached else None
        losses, step_seconds = [], []
        for tokens in _batches(options["steps"], ranks.rank):
            started = time.perf_counter()
            loss = engine(tokens.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())  # waits for the device
            step_seconds.append(time.perf_counter() - started)
            advance(name)
        stats = {} if transfer is None else {key: vars(counts) for key, counts in transfer.stats().items()}
        parameters = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            weights = [parameter.detach().cpu().clone().contiguous() for parameter in parameters]
    finally:
        engine.destroy()  # gives every pinned byte back
    every = ranks.gather(stats)
    counted = {key for of_rank in every for key, counts in of_rank.items() if counts["copies"]}
    return {
        "name": name,
        "losses": losses,
        "step_seconds": step_seconds,
        # The first step allocates.
        "median_step_seconds": statistics.median(step_seconds[1:] or step_seconds),
        "strategies": sorted(counted),
        "copies": sum(counts["copies"] for of_rank in every for counts in of_rank.values()),
        "copied_bytes": sum(counts["bytes"] for of_rank in every for counts in of_rank.values()),
    }, weights


def _batches(steps: int, rank: int) -> Iterator[Tensor]:
    """The same for both runs, others on each rank: bytes of Python's reference manual as tokens."""
    from pydoc_data.topics import topics

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        starts = torch.randint(len(text) - _CONTEXT, (_BATCH,), generator=generator)
        yield torch.stack([text[start : start + _CONTEXT] for start in starts.tolist()]).long()
