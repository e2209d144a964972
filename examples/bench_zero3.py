"""How long ZeRO-3's optimizer step takes with DeepSpeed's copy-back, and with ours.

    python -m torch.distributed.run --standalone --nproc_per_node 1 examples/bench_zero3.py --csv step.csv

One engine, whose optimizer state lives on the host, takes its steps in turn: DeepSpeed's own copy, each
strategy, and again. So a machine whose speed drifts drifts for all of them; the ratio is taken
round by round. Needs an accelerator, and a compiler for DeepSpeed's CPU Adam.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import statistics
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from accelerators import get_accelerator
from transfer import HostToDeviceTransfer, build_transfer, zero3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8192, help="of each layer (default 8192)")
    parser.add_argument("--layers", type=int, default=15, help="each has width^2 parameters (default 15: 1.0 billion)")
    parser.add_argument("--sub-groups", type=int, default=4, help="on each rank (default 4)")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each scheme, interleaved (default 8)")
    parser.add_argument("--threads", type=int, default=12, help="host threads of each rank (default 12)")
    parser.add_argument("--csv", type=Path, help="also write every measurement there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.accelerator.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()

    engine = make_engine(options)
    schemes: dict[str, HostToDeviceTransfer | None] = {
        "deepspeed": None,
        "pageable": build_transfer({"strategy": "pageable"}),
        "staged 2 x 2^26": build_transfer({"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 2**26}}),
        "default": build_transfer({}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in schemes}
    for _ in range(options.rounds + 1):
        for name, transfer in schemes.items():
            if transfer is not None:
                zero3.attach(engine, transfer)
            seconds[name].append(step_seconds(engine, options.width))
            zero3.detach(engine)
    if torch.distributed.get_rank() == 0:
        show(seconds)
        if options.csv:
            write(options.csv, seconds)
    for transfer in schemes.values():
        if transfer is not None:
            transfer.close()
    engine.destroy()
    torch.distributed.destroy_process_group()


def make_engine(options: argparse.Namespace) -> deepspeed.DeepSpeedEngine:
    parameters = options.width**2 * options.layers
    share = parameters // int(os.environ["WORLD_SIZE"])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            # Whole layers make up a sub-group: a little more than the share, so that the number comes out.
            "sub_group_size": share // options.sub_groups + options.width**2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "steps_per_print": 10**9,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)))
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-5)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if torch.distributed.get_rank() == 0:
        groups = len(engine.optimizer.fp32_partitioned_groups_flat)
        ranks, threads = torch.distributed.get_world_size(), torch.get_num_threads()
        print(
            f"{parameters / 1e9:.2f} billion parameters, {groups} sub-groups a rank, {ranks} ranks of {threads} threads"
        )
    return engine


def step_seconds(engine: deepspeed.DeepSpeedEngine, width: int) -> float:
    """One forward and backward, and then the time of the optimizer step alone."""
    loss = engine(torch.randn(1, width, device=engine.device, dtype=torch.bfloat16)).float().pow(2).mean()
    engine.backward(loss)
    get_accelerator().synchronize()
    torch.distributed.barrier()
    started = time.perf_counter()
    engine.step()
    get_accelerator().synchronize()
    return time.perf_counter() - started


def show(seconds: dict[str, list[float]]) -> None:
    print(f"{'scheme':16} {'median step, s':>15} {'times faster':>13}")
    for name, values in seconds.items():
        pairs = zip(seconds["deepspeed"][1:], values[1:], strict=True)  # the first round warms up
        print(f"{name:16} {statistics.median(values[1:]):15.3f} {statistics.median(a / b for a, b in pairs):13.2f}")


def write(path: Path, seconds: dict[str, list[float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["scheme", "round", "step_seconds"])
        for name, values in seconds.items():
            writer.writerows([name, index, f"{value:.4f}"] for index, value in enumerate(values[1:]))


if __name__ == "__main__":
    main()
