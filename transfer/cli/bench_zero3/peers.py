"""``h2d bench zero3 --peers``: whole iterations of what a user may pick instead, each in processes of its own.

All train the same model on the same tokens, with the same threads, and clip gradients to a norm of 1, which is
DeepSpeed's default. They take turns as processes: a round has one of each.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...accelerator_choice import AcceleratorChoice
from ...errors import StrategyUnavailableError
from ..measuring.hardware import describe
from ..measuring.ranks import Ranks, RanksFailedError, launch
from ..measuring.report import (
    Column,
    console,
    hardware_line,
    legend,
    make_table,
    number,
    plural,
    say,
    spread_percent,
    times,
)
from .engine import make_engine, start_deepspeed
from .transformer import VOCABULARY, Transformer

_OFFLOAD_PARAM = {"offload_param": {"device": "cpu", "pin_memory": True}}
#: What each is, and what it adds to the section ``zero_optimization``; None for what is no DeepSpeed.
PEERS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "deepspeed": ("DeepSpeed as it is", {}),
    "default": ("DeepSpeed with this package", {}),
    "offload_param": ("DeepSpeed whose parameters are offloaded too", _OFFLOAD_PARAM),
    "offload_param, default": ("the same with this package", _OFFLOAD_PARAM),
    "superoffload": ("DeepSpeed's SuperOffload", {"offload_optimizer": {"super_offload": True}}),
    "fsdp2": ("torch's FSDP2, CPU offload, fused AdamW, bf16 compute", None),
}
PHASES = ("forward", "backward", "step")
_WARM_UP = 2
_MOST_NORM = 1.0


class _Training(NamedTuple):
    """The phases of an iteration."""

    forward: Callable[[], Any]
    backward: Callable[[Any], object]
    step: Callable[[], object]


def measure_one(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Trains one peer: a worker for ``ranks.launch``, with the command's options and ``peer``.

    Returns:
        ``hardware``, ``parameters``, the seconds of each phase of each iteration on the slowest rank, and the bytes of
        host memory that training has taken on this rank.
    """
    accelerator = AcceleratorChoice(options["accelerator"]).resolve()
    before = _resident_bytes()
    section = PEERS[options["peer"]][1]
    if section is None:
        training, parameters = _fsdp2(options, accelerator)
    else:
        training, parameters = _deepspeed(options, accelerator, section)
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for number_of in range(_WARM_UP + options["steps"]):
        loss = None
        for phase in PHASES:
            started = ranks.start(accelerator)
            loss = _run(training, phase, loss)
            accelerator.synchronize()
            if number_of >= _WARM_UP:
                seconds[phase].append(max(ranks.gather(time.perf_counter() - started)))
    return {
        "hardware": describe(accelerator),
        "parameters": parameters,
        "seconds": seconds,
        "host_bytes": _resident_bytes() - before,
    }


def _run(training: _Training, phase: str, loss: Any) -> Any:
    if phase == "forward":
        return training.forward()
    if phase == "backward":
        training.backward(loss)
    else:
        training.step()
    return None


def _deepspeed(options: Mapping[str, Any], accelerator: Any, section: Mapping[str, Any]) -> tuple[_Training, int]:
    from ... import zero3

    start_deepspeed(accelerator)
    engine = make_engine({**options, "zero": section}, accelerator)
    if options["peer"].endswith("default"):
        zero3.attach(engine)
    tokens = _tokens(options, engine.device)
    parameters = sum(parameter.ds_numel for parameter in engine.module.parameters())
    return _Training(lambda: engine(tokens), engine.backward, engine.step), parameters


def _fsdp2(options: Mapping[str, Any], accelerator: Any) -> tuple[_Training, int]:
    """FSDP2 as its documentation has it: each block is a unit, and all states are on the host.

    Raises:
        StrategyUnavailableError: This torch has none.
    """
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    except ImportError as error:
        raise StrategyUnavailableError(f"torch {torch.__version__} has no FSDP2.") from error
    device = accelerator.device_empty(1, dtype=torch.uint8).device
    on_host = device.type == "cpu"
    torch.distributed.init_process_group("gloo" if on_host else f"cpu:gloo,{device.type}:nccl")
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        # Nothing to offload where the device is the host.
        "offload_policy": OffloadPolicy() if on_host else CPUOffloadPolicy(pin_memory=True),
    }
    model = Transformer(options["layers"], options["hidden"])
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    tokens = _tokens(options, device)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _Training(lambda: model(tokens), lambda loss: loss.backward(), step), parameters


def _tokens(options: Mapping[str, Any], device: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (options["batch"], options["sequence"]), generator=generator).to(device)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def compare(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Lets peers take turns, and says on the standard error whose turn it is.

    Returns:
        ``hardware``, ``parameters``, ``peers`` (for each of ``names`` its rounds) and ``not_run`` (with reasons).
    """
    found: dict[str, Any] = {"hardware": None, "parameters": None, "peers": {}, "not_run": []}
    began = time.monotonic()
    for turn in range(options["rounds"]):
        for name in [each for each in names if all(each != one["peer"] for one in found["not_run"])]:
            print(f"round {turn + 1} of {options['rounds']}: {name}", file=sys.stderr, flush=True)
            try:
                one = launch(
                    "transfer.cli.bench_zero3.peers:measure_one",
                    {**options, "peer": name},
                    options["ranks"],
                    threads=options["threads"],
                    deepspeed=True,
                )
            except RanksFailedError as error:
                found["not_run"].append({"peer": name, "reason": str(error)})
                continue
            found["hardware"], found["parameters"] = one["hardware"], one["parameters"]
            found["peers"].setdefault(name, []).append({"seconds": one["seconds"], "host_bytes": one["host_bytes"]})
        spent = time.monotonic() - began
        if spent * (turn + 2) / (turn + 1) > (options["limit_seconds"] or float("inf")):
            break
    return found


_SECONDS = number(".3f")
_COLUMNS = (
    Column("peer", "peer"),
    Column("for-\nward s", "forward", _SECONDS),
    Column("back-\nward s", "backward", _SECONDS),
    Column("step\ns", "step", _SECONDS),
    Column("itera-\ntion s", "iteration", _SECONDS),
    Column("spread\n%", "spread_percent", number(".0f")),
    Column("times\nDeep-\nSpeed", "times_deepspeed", times),
    Column("host\nbytes a\nparam.", "host_bytes_per_parameter", number(".1f")),
)


def with_figures(found: Mapping[str, Any], ranks: int) -> Iterator[dict[str, Any]]:
    """What the tables and the JSON have of each peer. Ratios are medians of the rounds' ratios of medians."""
    iterations = {name: [_iterations(one["seconds"]) for one in rounds] for name, rounds in found["peers"].items()}
    base = [statistics.median(each) for each in iterations.get("deepspeed", [])]
    for name, rounds in found["peers"].items():
        every = [each for of_round in iterations[name] for each in of_round]
        ratios = [before / statistics.median(each) for before, each in zip(base, iterations[name], strict=False)]
        figures = {
            phase: statistics.median(each for one in rounds for each in one["seconds"][phase]) for phase in PHASES
        }
        bytes_of_all = ranks * statistics.median(one["host_bytes"] for one in rounds)
        yield {
            "peer": name,
            "rounds": rounds,
            "figures": {
                **figures,
                "iteration": statistics.median(every),
                "quartiles": statistics.quantiles(every, n=4, method="inclusive") if len(every) > 1 else every * 3,
                "spread_percent": spread_percent(every),
                "times_deepspeed": statistics.median(ratios) if ratios else None,
                "host_bytes_per_parameter": bytes_of_all / found["parameters"],
            },
        }


def _iterations(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    return [sum(phases) for phases in zip(*(seconds[phase] for phase in PHASES), strict=True)]


_NOTE = (
    "Medians of {how_many}, processes in turn; ratios are medians of the rounds' ratios. Spread: the interquartile "
    "range, in percent of the median. Host memory: what training has added to the resident memory of all ranks."
)


def show(report: Mapping[str, Any]) -> None:
    """Prints the table, and what could not run."""
    out, measured = console(), report["peers"]
    if report["hardware"] is not None:
        say(out, hardware_line(report["hardware"], report["ranks"]))
        say(out, f"{report['parameters']:,} parameters ({report['layers']} layers of {report['hidden']})")
    out.print(make_table("whole iterations, in processes of their own", _COLUMNS, [measured]))
    out.print(legend({one["peer"]: PEERS[one["peer"]][0] for one in measured}))
    for entry in report["not_run"]:
        say(out, f"not run: {entry['peer']}: {entry['reason']}")
    rounds = max((len(one["rounds"]) for one in measured), default=0)
    how_many = f"{plural(rounds, 'round')} of {plural(report['steps'], 'iteration')}"
    say(out, _NOTE.format(how_many=how_many))
