"""How far the model is from runs that it was not made from.

Its constants come from single copies and single updates (``machine``), and of whole runs only Python's time in forward
and backward comes from one, whose iterations are not among these. Each run here is predicted with typical rates, as for
a user without a profile; only rates of drives are those that were measured beside the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .machine import machine
from .model import DEEPSPEED, DIRECT, FSDP2, OFFLOAD_PARAM, OURS_PARAM, PIPELINED, RING, Job, predict

COPY_BACK, STEP, ITERATION = "copy_back_seconds", "step_seconds", "iteration_seconds"
#: A prediction that is further off has not described what happens.
ROUGH = 0.3
#: What ``machine`` takes where a user gives nothing.
NOTHING_GIVEN = {
    **dict.fromkeys(("link", "memory_bandwidth", "network", "drive", "tflops")),
    "device": "h200",
    "nvme": False,
}


@dataclass(frozen=True)
class Run:
    """A measured run.

    Attributes:
        source: Its file in examples/figures, or where else it is from.
        job: What was trained, with 12 host threads a rank on H200s.
        seconds: Medians, by way and quantity.
        drive: GB/s, if state was in files.
    """

    source: str
    job: Job
    seconds: Mapping[tuple[str, str], float]
    drive: float | None = None


class Check(NamedTuple):
    """One quantity of one run. ``off`` is what is predicted too much, as a share of what was measured."""

    source: str
    way: str
    quantity: str
    measured_seconds: float
    predicted_seconds: float

    @property
    def off(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1


def _job(parameters: int, layers: int, tokens: int = 512, ranks: int = 1) -> Job:
    """Of `h2d bench zero3`, which makes four sub-groups of about one size."""
    return Job(parameters, ranks, layers=layers, tokens=tokens, sub_group_elements=-(-parameters // (4 * ranks)))


_BILLION, _QUARTER, _TENTH = (1_027_720_448, 18), (264_770_176, 11), (102_866_944, 8)
#: What one thread reads from a memory file system, and what reading from that machine's disk reached.
_MEMORY_FILES, _DISK = 4.0, 2.34

RUNS = (
    Run(
        "zero3_h200_first.json",
        _job(*_BILLION),
        {
            (DEEPSPEED, COPY_BACK): 0.6588,
            (DEEPSPEED, STEP): 1.0972,
            (DEEPSPEED, ITERATION): 1.4161,
            (RING, STEP): 0.5662,
        },
    ),
    Run(
        "zero3_h200_second.json",
        _job(*_BILLION),
        {
            (DEEPSPEED, COPY_BACK): 0.5087,
            (DEEPSPEED, STEP): 0.9057,
            (DEEPSPEED, ITERATION): 1.1774,
            (RING, STEP): 0.5294,
        },
    ),
    Run(
        "zero3_2_h200.json",
        _job(1_425_122_816, 20, ranks=2),
        {
            (DEEPSPEED, COPY_BACK): 0.3774,
            (DEEPSPEED, STEP): 0.7668,
            (DEEPSPEED, ITERATION): 1.0781,
            (RING, STEP): 0.5044,
        },
    ),
    Run(
        "zero3_stream_h200.json",
        _job(*_BILLION, 2048),
        {
            (DEEPSPEED, COPY_BACK): 0.5931,
            (DEEPSPEED, STEP): 0.9541,
            (DEEPSPEED, ITERATION): 1.2748,
            (RING, STEP): 0.4548,
            (DIRECT, STEP): 0.4382,
            (DIRECT, ITERATION): 0.7811,
        },
    ),
    Run(
        "whole_iterations_h200.csv, round 1",
        _job(*_BILLION, 2048),
        {(DEEPSPEED, STEP): 0.851, (DIRECT, STEP): 0.393},
    ),
    Run(
        "whole_iterations_h200.csv, round 2",
        _job(*_BILLION, 2048),
        {
            (DEEPSPEED, STEP): 0.897,
            (DEEPSPEED, ITERATION): 1.194,
            (DIRECT, STEP): 0.324,
            (DIRECT, ITERATION): 0.537,
        },
    ),
    Run(
        "a run of 2026-11-30 with 2 GPUs, which was not kept",
        _job(1_930_000_000, 20, ranks=2),
        {(DEEPSPEED, COPY_BACK): 0.626, (DEEPSPEED, STEP): 1.128, (RING, STEP): 0.686},
    ),
    Run(
        "a run of 2026-11-30 with one sequence of 2,048, which was not kept",
        _job(986_000_000, 18, 2048),
        {
            (OFFLOAD_PARAM, STEP): 0.396,
            (OFFLOAD_PARAM, ITERATION): 0.638,
            (FSDP2, STEP): 0.242,
            (FSDP2, ITERATION): 0.432,
        },
    ),
    Run(
        "peers_h200.json",
        _job(402_907_200, 13),
        {
            (DEEPSPEED, STEP): 0.3426,
            (DEEPSPEED, ITERATION): 0.5284,
            (DIRECT, STEP): 0.1586,
            (DIRECT, ITERATION): 0.3269,
            (OFFLOAD_PARAM, STEP): 0.1872,
            (OFFLOAD_PARAM, ITERATION): 0.3823,
            (OURS_PARAM, STEP): 0.1798,
            (OURS_PARAM, ITERATION): 0.3507,
            (FSDP2, STEP): 0.3139,
            (FSDP2, ITERATION): 0.3967,
        },
    ),
    Run(
        "zero3_nvme_disk_h200.json",
        _job(*_QUARTER),
        {(DEEPSPEED, STEP): 4.0549, (DEEPSPEED, ITERATION): 4.2732},
        _DISK,
    ),
    Run(
        "zero3_nvme_disk_small_h200.json",
        _job(*_TENTH),
        {(DEEPSPEED, STEP): 1.8226, (DEEPSPEED, ITERATION): 1.9727},
        _DISK,
    ),
    Run(
        "zero3_nvme_memory_h200.json",
        _job(*_BILLION),
        {(DEEPSPEED, STEP): 8.6885, (DEEPSPEED, ITERATION): 9.2939},
        _MEMORY_FILES,
    ),
    Run(
        "zero3_nvme_memory_small_h200.json",
        _job(*_TENTH),
        {(DEEPSPEED, STEP): 0.944, (DEEPSPEED, ITERATION): 1.0799},
        _MEMORY_FILES,
    ),
    Run(
        "zero3_nvme_memory_pipelined_h200.json",
        _job(*_QUARTER),
        {(PIPELINED, STEP): 1.5044, (PIPELINED, ITERATION): 1.7683},
        _MEMORY_FILES,
    ),
    Run(
        "published: Qwen2.5-32B on 8 H200, the loop over sub-groups",
        Job(32_763_876_352, ranks=8),
        {(DEEPSPEED, STEP): 5.73, (RING, STEP): 3.64},
    ),
)


def checks() -> Iterator[Check]:
    """Every quantity of every run."""
    for run in RUNS:
        given = {**NOTHING_GIVEN, "ranks": run.job.ranks, "threads": 12, "drive": run.drive}
        ways = predict(run.job, machine(given, run.job.nodes).rates)
        for (way, quantity), seconds in run.seconds.items():
            yield Check(run.source, way, quantity, seconds, getattr(ways[way], quantity))


def gains() -> Iterator[tuple[str, str, float, float]]:
    """Source and quantity of each run with DeepSpeed and this package, and how many times faster this package was.

    That is: as measured, and as predicted.
    """
    of_run: dict[tuple[str, str], dict[str, Check]] = {}
    for check in checks():
        of_run.setdefault((check.source, check.quantity), {})[check.way] = check
    for (source, quantity), ways in of_run.items():
        if DEEPSPEED in ways and DIRECT in ways:
            slow, fast = ways[DEEPSPEED], ways[DIRECT]
            measured = slow.measured_seconds / fast.measured_seconds
            yield source, quantity, measured, slow.predicted_seconds / fast.predicted_seconds


def as_data() -> list[dict[str, Any]]:
    """Every check for JSON."""
    return [{**check._asdict(), "off": check.off} for check in checks()]


def by_way() -> dict[tuple[str, str], list[Check]]:
    """The checks of each way and quantity, state in memory and in files apart."""
    in_files = {run.source for run in RUNS if run.drive is not None}
    found: dict[tuple[str, str], list[Check]] = {}
    for check in checks():
        way = f"{check.way}, files" if check.source in in_files else check.way
        found.setdefault((way, check.quantity), []).append(check)
    return found


def job_data(job: Job) -> dict[str, Any]:
    """A job for JSON."""
    return {**asdict(job), "layers": job.depth}
