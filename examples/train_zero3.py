"""Trains a small language model with DeepSpeed ZeRO-3, its optimizer on the host.

One line is this package's: ``zero3.attach(engine)``. Start it under a launcher::

    python -m torch.distributed.run --standalone --nproc_per_node 2 examples/train_zero3.py

On a machine without an accelerator, ``--simulate`` takes the simulated one, where copies happen late.
``h2d demo`` does such a training twice and compares every bit with DeepSpeed alone.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pydoc_data.topics import topics  # Python's own reference manual: what the model reads
from typing import Any

import deepspeed
import torch
from torch import nn

from accelerators.simulated import SimulatedAccelerator
from transfer import zero3

LENGTH, BATCH = 32, 4
DEEPSPEED_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "bf16": {"enabled": True},
    # torch's optimizer needs no compiler; leave torch_adam out for DeepSpeed's faster CPU Adam.
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "sub_group_size": 1_000_000, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 10**9,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file such as examples/transfer.yaml; default: $H2D_CONFIG or defaults")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--simulate", action="store_true", help="use the simulated accelerator")
    options = parser.parse_args()

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed 0.19, torch 2.13
    simulated = SimulatedAccelerator() if options.simulate else None
    if simulated is not None:
        deepspeed.accelerator.set_accelerator(simulated.as_deepspeed())
    else:
        deepspeed.accelerator.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()

    # Guesses each byte of a text from the one before.
    model = nn.Sequential(
        nn.Embedding(256, 512),
        nn.Linear(512, 2048),
        nn.GELU(),
        nn.Linear(2048, 512),
        nn.Linear(512, 256),
    )
    engine = deepspeed.initialize(model=model, config=DEEPSPEED_CONFIG)[0]
    if simulated is not None:
        for partition in engine.optimizer.fp16_partitioned_groups_flat:
            simulated.adopt(partition)  # DeepSpeed took host memory for the device's
    transfer = zero3.attach(engine, options.config)  # the one line that matters

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())  # each rank reads elsewhere
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator).tolist()
        tokens = torch.stack([text[start : start + LENGTH + 1] for start in starts]).long().to(engine.device)
        guesses = engine(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if torch.distributed.get_rank() == 0:
        copies = sum(counts.copies for counts in transfer.stats().values())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps, {copies} copies", flush=True)
    engine.destroy()  # gives every pinned byte back
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
