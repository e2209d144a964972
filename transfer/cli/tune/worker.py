"""One rank's run through every measurement of `h2d tune`."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accelerators import get_accelerator
from accelerators.hardware import cores, cpu_model, device_name

from ...measured.profile import Circumstances, Machine, MachineProfile
from ..measuring.ranks import Ranks
from . import measure
from .drive import Bounds, measure_drive

_STEPS = 11


def run(options: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A worker for ``ranks.launch``; returns the fields of a ``MachineProfile``.

    Args:
        options: ``accelerator`` (a name or None), ``rounds`` and ``largest_chunk`` as in ``Bench``, ``nvme`` (a
            directory or None) and ``drive_bounds`` (of ``tune_drive.Bounds``).
        ranks: Which measure together.
    """
    accelerator = get_accelerator(options["accelerator"])
    bench = measure.Bench(accelerator, ranks, options["rounds"], options["largest_chunk"])
    fields: dict[str, Any] = {
        "machine": Machine(
            accelerator=accelerator.name, device=device_name(accelerator), cpu=cpu_model(), cores=cores()
        ),
        "measured": Circumstances(
            date=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            torch_version=torch.__version__,
            ranks=ranks.size,
            threads_per_rank=torch.get_num_threads(),
        ),
    }
    lacks = {
        name: reason
        for name in ("streams", "events", "pins_host_memory", "registers_host_memory")
        if (reason := accelerator.capabilities.why_not(name)) is not None
    }
    with _progress(ranks) as step:
        step("an optimizer's update on the host")
        fields["host_update_elements_per_second"] = measure.host_update(bench)
        source = torch.ones(2 * bench.largest_chunk, dtype=measure.SOURCE, device="cpu")
        step("copies out of pageable memory")
        fields["pageable"] = measure.pageable(bench, source)
        step("casts on the device")
        fields["device_cast_elements_per_second"] = measure.device_cast(bench)
        step("page-locking")
        fields["page_lock_seconds_per_gib"], reason = measure.page_lock(bench, source)
        if reason is not None:
            lacks["registers_host_memory"] = reason
        elif accelerator.capabilities.maps_host_memory:
            step("reads by the device")
            fields["mapped_elements_per_second"] = measure.mapped_read(bench, source)
        if "pins_host_memory" not in lacks:
            try:
                fields |= _through_pinned_memory(bench, source, "events" in lacks, step)
            except measure.PinningRefusedError as refused:
                lacks["pins_host_memory"] = str(refused)
        if options["nvme"] is not None:
            step("the drive")
            fields["drive"] = measure_drive(options["nvme"], ranks, Bounds(**options["drive_bounds"]))
    return MachineProfile(**_rounded(fields), lacks=lacks).model_dump()


def _through_pinned_memory(
    bench: measure.Bench, source: torch.Tensor, without_events: bool, step: Callable[[str], None]
) -> dict[str, Any]:
    with bench.pinned(bench.largest_chunk) as buffer:
        step("the wire")
        found: dict[str, Any] = {"wire": measure.wire(bench, buffer)}
        step("casts on the host")
        found["host_cast"] = measure.host_cast(bench, source, buffer)
        if not without_events:
            step("a ring of small staging buffers")
            found["staged_chunk_seconds"] = measure.staged_chunk(bench, source, buffer)
            step("the latency of one chunk")
            found["latency_seconds"] = measure.latency(bench, buffer)
            step("chunks cast on the device")
            found["direct_chunk_seconds"] = measure.direct_chunk(bench, buffer)
    return found


def _rounded(value: Any) -> Any:
    """With four digits: no measurement has more."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return {key: _rounded(entry) for key, entry in value.items()} if isinstance(value, dict) else value


@contextmanager
def _progress(ranks: Ranks) -> Iterator[Callable[[str], None]]:
    """Shows what is being measured on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if ranks.rank != 0 or not console.is_terminal:
        yield lambda _what: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=_STEPS)
        finished = itertools.count()

        def step(what: str) -> None:
            progress.update(task, description=f"measuring {what}", completed=next(finished))

        yield step
