"""Steps over and over: nothing that a process holds grows."""

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.growth import check_growth, rounds
from tests.running import run_python
from tests.zero3.launching import READY
from tests.zero3.stand_ins import SteppingStage3, TiledStage3
from tests.zero3.test_deferred import DIRECT, STAGED
from transfer import build_transfer, zero3
from transfer.zero3 import plan, tiles

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="What a process holds is read in /proc."),
]

CONFIGS = {
    "direct": DIRECT,
    "staged": STAGED,
    "immediate": {**STAGED, "completion": "immediate"},
    "sample": {**DIRECT, "verify": "sample"},
    "full": {**STAGED, "verify": "full"},
}


class Forgetful(TiledStage3):
    """Without the lists in which the stand-in notes what it sees."""

    def step(self, closure=None):
        super().step(closure)
        self.calls.clear()
        self.seen_at_update.clear()
        self.optimizer.ds_opt_adam.updated.clear()


@rounds(100, 10_000)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("swapped", [False, True], ids=["in memory", "through a swap buffer"])
def test_steps_of_the_stand_in(simulated, monkeypatch, name, swapped, number):
    monkeypatch.setattr(plan, "updates_in_parts", lambda _: True)
    monkeypatch.setattr(tiles, "ALIGNMENT_ELEMENTS", 2)
    monkeypatch.setattr(tiles, "default_tile_elements", lambda: 3)
    optimizer = Forgetful(simulated)
    if swapped:
        optimizer.use_swap_buffers(simulated)
    transfer = build_transfer(CONFIGS[name], simulated)
    zero3.attach(optimizer, transfer)
    check_growth(optimizer.step, number, simulated)
    zero3.detach(optimizer)
    transfer.close()
    assert simulated.pinned_bytes == (optimizer.swap_buffer.nbytes if swapped else 0)


@rounds(100, 3_000)
def test_masters_that_are_rebound(simulated, number):
    """As a checkpoint that is loaded, or a framework that moves them, in each step."""
    optimizer = SteppingStage3(simulated, sub_groups=3)
    transfer = build_transfer(DIRECT, simulated)
    zero3.attach(optimizer, transfer)

    def work():
        for index in range(3):
            optimizer.fp32_partitioned_groups_flat[index] = torch.arange(8.0)
        optimizer.step()
        optimizer.calls.clear()
        optimizer.seen_at_update.clear()

    check_growth(work, number, simulated)


#: Trains a small model with the real ZeRO-3 on one rank; arguments: steps, and the configuration.
TRAINING = """
    import json, os, sys, warnings
    import deepspeed, torch
    from accelerators.simulated import SimulatedAccelerator
    from tests.growth import check_growth
    from transfer import zero3

    warnings.simplefilter("ignore")
    simulated = SimulatedAccelerator()
    deepspeed.accelerator.set_accelerator(simulated.as_deepspeed())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "sub_group_size": 300, "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 10**9,
    }
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    engine = deepspeed.initialize(model=model, config=config)[0]
    for partition in engine.optimizer.fp16_partitioned_groups_flat:
        simulated.adopt(partition)
    transfer = zero3.attach(engine, json.loads(sys.argv[2]))
    values = torch.randn(2, 16, dtype=torch.bfloat16)

    def work():
        engine.backward(engine(values).square().mean())
        engine.step()

    check_growth(work, int(sys.argv[1]), simulated)
    print(sum(counts.copies for counts in transfer.stats().values()), "copies")
    engine.destroy()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.slow
@rounds(100, 10_000)
@pytest.mark.parametrize("config", ['{"verify": "sample"}', '{"strategy": "pinned_staged"}'])
def test_steps_of_deepspeed(config, number):
    program = textwrap.dedent(TRAINING)
    done = run_python("-c", program, number, config, environment=os.environ, timeout=3000, forked=True, prepared=READY)
    assert done.returncode == 0, done.stderr[-3000:]
    sys.stdout.write(done.stdout)
    assert done.stdout.endswith(" copies\n")
