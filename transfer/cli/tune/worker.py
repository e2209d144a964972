"""What one rank of `h2d tune` measures: the strategies themselves, an optimizer's updates, and a drive."""

from __future__ import annotations

import datetime as dt
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from accelerators import Accelerator
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
from ..measuring.statistics import slowest
from .drive import Bounds, measure_drive

#: Chunks that are tried besides the configured ones.
CHUNKS = (2**20, 2**22, 2**24)
#: Elements of the optimizer's updates: from a small tile to one that is bound by memory.
_UPDATES = (2**18, 2**20, 2**22, 2**24)
_ADAM = "torch.optim.AdamW, fused"


def run(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A worker for ``ranks.launch``; returns the fields of a ``MachineProfile``.

    Args:
        options: ``accelerator`` (a name or None), ``config`` (a YAML file or None), ``elements`` (rising), ``rounds``
            (after one that warms up), ``nvme`` (a directory or None) and ``drive_bounds`` (of ``drive.Bounds``).
        ranks: Those that measure together. The slowest one counts.
    """
    accelerator = AcceleratorChoice(options["accelerator"]).resolve()
    machine = Machine(accelerator=accelerator.name, device=device_name(accelerator), cpu=cpu_model(), cores=cores())
    measured = Circumstances(
        date=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        torch_version=torch.__version__,
        ranks=ranks.size,
        threads_per_rank=torch.get_num_threads(),
    )
    drive = None
    named = list(_configurations(resolve_config(options["config"]), options["elements"][-1]))
    steps = len(named) * len(options["elements"]) + 1 + (options["nvme"] is not None)
    with progress(steps, visible=ranks.rank == 0) as advance:
        copies, not_measured = _copies(accelerator, measured, named, options, ranks, advance)
        updates = _updates(options, ranks)
        advance("updates by an optimizer")
        if options["nvme"] is not None:
            drive = measure_drive(options["nvme"], ranks, Bounds(**options["drive_bounds"]))
            advance("the drive")
    return MachineProfile(
        machine=machine,
        measured=measured,
        copies=copies,
        not_measured=not_measured,
        optimizer={"name": _ADAM, "updates": updates},
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
    accelerator: Accelerator,
    measured: Circumstances,
    named: list[tuple[str, Any]],
    options: Mapping[str, Any],
    ranks: Ranks,
    advance: Callable[[str], None],
) -> tuple[list[StrategyTimes], dict[str, str]]:
    times: list[list[CopyTime]] = [[] for _ in named]
    refused: dict[int, str] = {}
    for elements in options["elements"]:
        case = Case.of(accelerator, ranks, elements, measured.destination_dtype)
        for index, (name, config) in enumerate(named):
            if index not in refused:
                found = _time(case, name, config, options["rounds"])
                if isinstance(found, str):
                    refused[index] = found
                else:
                    times[index].append(found)
            advance(f"{name}, {elements:,} elements")
    copies = [
        StrategyTimes(strategy=name, settings=settings_of(config), times=times[index])
        for index, (name, config) in enumerate(named)
        if index not in refused
    ]
    reasons = {named[index][0]: reason for index, reason in reversed(refused.items())}
    for one in copies:
        reasons.pop(one.strategy, None)
    return copies, reasons


def _time(case: Case, name: str, config: Any, rounds: int) -> CopyTime | str:
    """The times of one strategy, or why it cannot make this copy."""
    copied, held, total = [], [], []
    # Without a fallback: what cannot run is not measured under another's name.
    with get_strategy(name)(config, case.accelerator, fallback=False) as transfer:
        variant = Variant(name, "strategy", transfer, case.source)
        reason = case.refusal(variant)
        if reason is not None:
            return reason
        if not all(case.ranks.gather(variant.right_bits)):
            return "It left wrong bits."
        for _ in range(rounds):
            copied.append(case.timed(variant))
            seconds = case.submitted(variant)
            held.append(seconds[0])
            total.append(seconds[1])
    return CopyTime(
        elements=case.source.numel(),
        copy_seconds=_median(case.ranks, copied),
        submit_seconds=_median(case.ranks, held),
        total_seconds=_median(case.ranks, total),
    )


def _updates(options: Mapping[str, Any], ranks: Ranks) -> list[dict[str, float]]:
    """Adam on the host: torch's fused one, which is bound by memory as DeepSpeed's is."""
    found = []
    for elements in [size for size in _UPDATES if size <= options["elements"][-1]] or [options["elements"][-1]]:
        weights = torch.ones(elements, device="cpu", requires_grad=True)
        weights.grad = torch.ones_like(weights)
        optimizer = torch.optim.AdamW([weights], fused=True)
        rounds = []
        for _ in range(options["rounds"] + 1):
            ranks.barrier()
            started = time.perf_counter()
            optimizer.step()
            rounds.append(time.perf_counter() - started)
        found.append({"elements": elements, "seconds": _median(ranks, rounds[1:])})
    return found


def _median(ranks: Ranks, seconds: list[float]) -> float:
    """With four digits, as no measurement has more; above 0, which a coarse clock may say."""
    return float(f"{max(statistics.median(slowest(ranks.gather(seconds))), 1e-9):.4g}")
