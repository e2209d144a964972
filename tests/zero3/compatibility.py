"""Configurations of ZeRO-3 on two ranks, by DeepSpeed alone and attached: what each has trained.

Usage: ``compatibility.py OUT``, on ranks as a launcher starts them. Writes, for each case, what both have seen, and how
many copies the transfer made. See ``CASES``.
"""

import contextlib
import copy
import functools
import gc
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch._dynamo
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import groups

from accelerators.simulated import SimulatedAccelerator
from tests.zero3 import cpu_adam_build
from transfer import build_transfer, zero3
from transfer.zero3 import tiles

#: Masters here are small: let them be updated in tiles all the same.
tiles.ALIGNMENT_ELEMENTS = 1024
tiles.default_tile_elements = lambda: 1024
WIDTH, STEPS = 48, 4
DIRECT = {"strategy": "pinned_direct", "fallback": False}


class Trainer:
    """One engine, and what is seen of it."""

    def __init__(self, *, attached, optimizer=DeepSpeedCPUAdam, section=None, zero=None, zero_init=False, dtype="bf16"):
        self.seen, self.transfer = [], None
        self.accelerator = SimulatedAccelerator()
        deepspeed.accelerator.set_accelerator(self.accelerator.as_deepspeed())
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.01,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 3000,
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": {"device": "cpu"},
                **(zero or {}),
            },
        }
        if dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if section is not None:
            config["optimizer"] = section
        torch.manual_seed(3)
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # of hpZ: DeepSpeed makes one for each process
        with deepspeed.zero.Init(config_dict_or_path=config) if zero_init else contextlib.nullcontext():
            self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.parameters = list(self.model.parameters())
        made = None if section is not None else optimizer(self.parameters, lr=1e-2)
        given = {"optimizer": made} if made is not None else {"model_parameters": self.parameters}
        self.engine = deepspeed.initialize(model=self.model, config=config, **given)[0]
        self.adopt()
        if attached:
            self.transfer = zero3.attach(self.engine, build_transfer({**DIRECT, "fallback": True}, self.accelerator))
        self.generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.dtype = torch.bfloat16 if dtype == "bf16" else torch.float32

    def adopt(self):
        for partition in self.engine.optimizer.fp16_partitioned_groups_flat:
            self.accelerator.adopt(partition)

    def train(self, steps=STEPS):
        for _ in range(steps):
            batch = torch.randn(2, WIDTH, generator=self.generator).to(self.dtype)
            loss = self.engine(batch).float().pow(2).mean()
            self.engine.backward(loss)
            self.engine.step()
            self.seen.append(loss.detach().clone())
        return self

    def end(self):
        """Everything seen, with the weights at the end in fp32 and as they are; and the number of copies."""
        self.seen += [deepspeed.utils.safe_get_full_fp32_param(each).clone() for each in self.parameters]
        with deepspeed.zero.GatheredParameters(self.parameters):
            self.seen += [each.detach().clone() for each in self.parameters]
        copies = 0 if self.transfer is None else sum(each.copies for each in self.transfer.stats().values())
        self.engine.destroy()
        return self.seen, copies


def plain(attached, **options):
    return Trainer(attached=attached, **options).train().end()


def frozen_and_unfrozen(attached):
    """A layer is frozen for two steps in the middle."""
    trainer = Trainer(attached=attached).train(2)
    for frozen in (False, True):
        trainer.model[1].requires_grad_(frozen)
        trainer.train(2)
    return trainer.end()


def two_engines(attached):
    """They train by turns in one process."""
    one, other = Trainer(attached=attached), Trainer(attached=attached, optimizer=torch.optim.AdamW)
    for _ in range(STEPS):
        one.train(1)
        other.train(1)
    (seen, copies), (more, others) = one.end(), other.end()
    assert (copies > 0) == (others > 0) == attached
    return seen + more, copies + others


def destroyed_and_made_again(attached):
    seen, copies = plain(attached)
    more, others = plain(attached)
    assert all(map(torch.equal, seen, more))
    return seen + more, copies + others


def moved_away_and_back(attached):
    """Parameters are offloaded between steps, as where another model is to have the device."""
    trainer = Trainer(attached=attached).train(2)
    for pinned in (True, False):
        trainer.engine.offload_states(pin_memory=pinned)
        trainer.engine.reload_states()
        trainer.adopt()
        trainer.train(1)
    return trainer.end()


def copied_engine(attached):
    """What ``copy.deepcopy`` does with an engine; it does the same with one that is attached."""
    trainer = Trainer(attached=attached).train(1)
    try:
        copy.deepcopy(trainer.engine)
    except Exception as error:  # noqa: BLE001 - whatever it is
        trainer.seen.append(torch.tensor(list(type(error).__name__.encode())))
    return trainer.train(2).end()


MUON = {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9}}
CASES = {
    "fp32": functools.partial(plain, dtype="fp32"),
    "torch AdamW": functools.partial(plain, optimizer=torch.optim.AdamW),
    "torch SGD": functools.partial(plain, optimizer=functools.partial(torch.optim.SGD, momentum=0.9)),
    "torch Adagrad": functools.partial(plain, optimizer=torch.optim.Adagrad),
    "Muon": functools.partial(plain, section=MUON, zero={"reduce_scatter": False}),
    "zero.Init": functools.partial(plain, zero_init=True),
    "hpZ": functools.partial(plain, zero={"zero_hpz_partition_size": 2}),
    "not pinned": functools.partial(plain, zero={"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    "frozen and unfrozen": frozen_and_unfrozen,
    "two engines": two_engines,
    "destroyed and made again": destroyed_and_made_again,
    "offloaded and reloaded": moved_away_and_back,
    "copied engine": copied_engine,
}


def main():
    out, rank = Path(sys.argv[1]), os.environ["RANK"]
    cpu_adam_build.ask_the_cpu_once()
    torch._dynamo.config.disable = True  # Muon compiles its kernels for half a minute
    deepspeed.accelerator.set_accelerator(SimulatedAccelerator().as_deepspeed())
    deepspeed.init_distributed()
    for name, case in CASES.items():
        try:
            torch.save([case(attached) for attached in (False, True)], out / f"{name}-{rank}.pt")
        except Exception as error:
            error.add_note(name)
            raise
        gc.collect()
        gc.freeze()  # DeepSpeed collects garbage for each engine, and would look through all modules
    torch.distributed.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort the process at its end, with or without this project


if __name__ == "__main__":
    main()
