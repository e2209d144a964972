"""Trains a small language model with DeepSpeed ZeRO-3, its optimizer on the host.

Every copy-back of master weights goes through ``host-to-device-transfer``. With ``--compare`` the same
training runs a second time under DeepSpeed alone, and the parameters must agree in every bit. On a
machine without an accelerator, ``--simulate`` takes the simulated one, where copies happen late::

    python -m torch.distributed.run --standalone --nproc_per_node 2 examples/train_zero3.py --simulate --compare

The text is the reference manual that comes with Python, or any file given with ``--text``.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from accelerators.simulated import SimulatedAccelerator
from transfer.zero3 import engines as zero3

CONTEXT = 64
BATCH = 8


class ByteModel(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        mask = torch.full((tokens.shape[1],) * 2, float("-inf"), device=hidden.device, dtype=hidden.dtype).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        logits: Tensor = self.head(hidden)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a YAML file such as examples/transfer.yaml; default: $H2D_CONFIG or defaults")
    parser.add_argument("--text", type=Path, help="what to learn; default: Python's own reference manual")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 4 (default 256)")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--simulate", action="store_true", help="use the simulated accelerator")
    parser.add_argument("--compare", action="store_true", help="also train under DeepSpeed alone; compare every bit")
    options = parser.parse_args()

    quieten()
    simulated = SimulatedAccelerator() if options.simulate else None
    if simulated is not None:
        deepspeed.accelerator.set_accelerator(simulated.as_deepspeed())
    else:
        deepspeed.accelerator.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()

    parameters = train(options, simulated, attached=True)
    if options.compare:
        alone = train(options, simulated, attached=False)
        different = [name for name, value in alone.items() if not torch.equal(bits(value), bits(parameters[name]))]
        elements = sum(value.numel() for value in alone.values())
        say(f"{len(alone)} parameters, {elements} elements: {len(different)} differ from DeepSpeed alone")
        if different:
            raise SystemExit(f"wrong bits in {', '.join(different)}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def bits(values: Tensor) -> Tensor:
    """Bytes: unlike values, they tell zeros from negative zeros and find equal NaNs equal."""
    return values.view(torch.uint8)


def train(options: argparse.Namespace, simulated: SimulatedAccelerator | None, attached: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = ByteModel(options.width, options.depth)
    engine = deepspeed.initialize(model=model, config=deepspeed_config())[0]
    if simulated is not None:
        for partition in engine.optimizer.fp16_partitioned_groups_flat:
            simulated.adopt(partition)
    transfer = zero3.attach(engine, options.config) if attached else None  # the one line that matters

    text = torch.frombuffer(bytearray(read_text(options.text)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long().to(engine.device)
        logits = engine(batch[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    who = "host-to-device-transfer" if attached else "DeepSpeed alone"
    pinned = f", {transfer.pinned_bytes / 2**20:.2f} MiB pinned" if transfer is not None else ""
    say(f"{who}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps{pinned}")

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = {name: value.detach().cpu().clone() for name, value in model.named_parameters()}
    engine.destroy()  # gives every pinned byte back
    return parameters


def deepspeed_config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        # torch's optimizer needs no compiler; leave torch_adam out for DeepSpeed's faster CPU Adam.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1_000_000,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
        },
        "steps_per_print": 10**9,
    }


def read_text(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode()


def quieten() -> None:
    """DeepSpeed 0.19 reports at length, and calls collectives that torch 2.13 warns of."""
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def say(message: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


if __name__ == "__main__":
    main()
