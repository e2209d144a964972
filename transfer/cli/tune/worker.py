"""What one rank of `h2d tune` measures: the strategies themselves, an optimizer's updates, and a drive."""

from __future__ import annotations

import datetime as dt
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from accelerators.hardware import cores, cpu_model, device_name

from ...accelerator_choice import AcceleratorChoice
from ...config import TransferConfig
from ...config_file import resolve_config
from ...measured.estimate import CANDIDATES, settings_of
from ...measured.profile import Circumstances, CopyTime, Machine, MachineProfile, StrategyTimes
from ...registry import get_strategy
from ..measuring.copies import Case, Variant
from ..measuring.progress import progress
from ..measuring.ranks import Ranks
from ..measuring.report import slowest
from .drive import Bounds, measure_drive

#: Chunks that are tried besides the configured ones.
CHUNKS = (2**20, 2**22, 2**24)
#: Elements of the optimizer's updates: from a small tile to one that is bound by memory.
_UPDATES = (2**18, 2**20, 2**22, 2**24)

Advance = Callable[[str], None]


def run(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A worker for ``ranks.launch``, with the command's options. Returns the fields of a ``MachineProfile``."""
    accelerator = AcceleratorChoice(options["accelerator"]).resolve()
    elements, rounds = options["elements"], 3 if options["quick"] else 5
    measured = Circumstances(
        date=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        torch_version=torch.__version__,
        ranks=ranks.size,
        threads_per_rank=torch.get_num_threads(),
    )
    drive = None
    named = list(_configurations(resolve_config(options["config"]), elements[-1]))
    with progress(len(named) * len(elements) + 1 + (options["nvme"] is not None), visible=ranks.rank == 0) as advance:
        cases = [Case.of(accelerator, ranks, number, measured.destination_dtype) for number in elements]
        copies, not_measured = _copies(cases, named, rounds, advance)
        del cases
        updates = _updates(elements[-1], rounds, ranks)
        advance("updates by an optimizer")
        if options["nvme"] is not None:
            bounds = Bounds(file_bytes=2**27, cell_seconds=0.05) if options["quick"] else Bounds()
            drive = measure_drive(options["nvme"], ranks, bounds)
            advance("the drive")
    return MachineProfile(
        machine=Machine(accelerator=accelerator.name, device=device_name(accelerator), cpu=cpu_model(), cores=cores()),
        measured=measured,
        copies=copies,
        not_measured=not_measured,
        optimizer={"name": "torch.optim.AdamW, fused", "updates": updates},
        drive=drive,
    ).model_dump(mode="json")


def _configurations(config: TransferConfig, largest: int) -> Iterator[tuple[str, Any]]:
    """Each strategy as configured, then with other chunks where it has chunks."""
    for name in CANDIDATES:
        section: Any = config.section(name)
        yield name, section
        for chunk in CHUNKS:
            if getattr(section, "chunk_elements", chunk) != chunk <= largest:
                yield name, section.model_copy(update={"chunk_elements": chunk})


def _copies(
    cases: list[Case], named: list[tuple[str, Any]], rounds: int, advance: Advance
) -> tuple[list[StrategyTimes], dict[str, str]]:
    """The times of what can make all of these copies, and the reason for each strategy that cannot."""
    copies: list[StrategyTimes] = []
    refused: dict[str, str] = {}
    for name, config in named:
        times: list[CopyTime] = []
        for case in cases:
            found = _time(case, name, config, rounds)
            advance(f"{name}, {case.source.numel():,} elements")
            if isinstance(found, str):
                refused.setdefault(name, found)
                break
            times.append(found)
        else:
            copies.append(StrategyTimes(strategy=name, settings=settings_of(config), times=times))
    for one in copies:
        refused.pop(one.strategy, None)
    return copies, refused


def _time(case: Case, name: str, config: Any, rounds: int) -> CopyTime | str:
    """The times of one strategy, or why it cannot make this copy."""
    copied, held, total = [], [], []
    with get_strategy(name)(config, case.accelerator) as transfer:
        variant = Variant(name, "strategy", transfer, case.source)
        reason = case.refusal(variant)
        if reason is not None:
            return reason
        if not all(case.ranks.gather(variant.right_bits)):
            return "It left wrong bits."
        for _ in range(rounds):
            copied.append(case.timed(variant))
            submit_seconds, seconds = case.submitted(variant)
            held.append(submit_seconds)
            total.append(seconds)
    return CopyTime(
        elements=case.source.numel(),
        copy_seconds=_median(case.ranks, copied),
        submit_seconds=_median(case.ranks, held),
        total_seconds=_median(case.ranks, total),
    )


def _updates(largest: int, rounds: int, ranks: Ranks) -> list[dict[str, float]]:
    """Adam on the host: torch's fused one, which is bound by memory as DeepSpeed's is."""
    found = []
    for elements in [size for size in _UPDATES if size <= largest] or [largest]:
        weights = torch.ones(elements, device="cpu", requires_grad=True)
        weights.grad = torch.ones_like(weights)
        optimizer = torch.optim.AdamW([weights], fused=True)
        seconds = []
        for _ in range(rounds + 1):
            ranks.barrier()
            started = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        found.append({"elements": elements, "seconds": _median(ranks, seconds[1:])})
    return found


def _median(ranks: Ranks, seconds: list[float]) -> float:
    """With four digits, as no measurement has more; above 0, which a coarse clock may say."""
    return float(f"{max(statistics.median(slowest(ranks.gather(seconds))), 1e-9):.4g}")
