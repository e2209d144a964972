"""Real ZeRO-3 on one rank with code of a user's that runs in the middle of a step, without this project and with it.

Usage: ``python -m tests.zero3.interfering OUT``. Writes, for each kind of such code, what it saw and what the
partitions hold at the end, as JSON.
"""

import contextlib
import functools
import json
import logging
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.zero import stage3
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from accelerators.simulated import SimulatedAccelerator
from transfer import build_transfer, zero3

STEPS, WIDTH = 2, 64
DIRECT = {"strategy": "pinned_direct", "pinned_direct": {"chunk_elements": 1000}, "fallback": False}
ZeroOptimizer = stage3.DeepSpeedZeroOptimizer_Stage3
AdamW = torch.optim.AdamW


def around(function, look):
    """As most people wrap: with the name, the module and the signature of what is wrapped."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        look()
        return function(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def replaced(owner, name, look):
    before = vars(owner)[name]
    setattr(owner, name, around(before, look))
    yield
    setattr(owner, name, before)


@contextlib.contextmanager
def registered(register, look):
    handle = register(lambda *_: look())
    yield
    handle.remove()


class Looking(AdamW):
    """A user's optimizer."""

    look = None

    def step(self, closure=None):
        self.look()
        return super().step(closure)


class Mode(TorchFunctionMode):
    """Sees every function of torch's."""

    def __init__(self, look):
        self.look = look

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "mul_":
            self.look()
        return function(*args, **(kwargs or {}))


def on_instance(name):
    return lambda zero, look: setattr(zero, name, around(getattr(zero, name), look))


#: Called with the ZeRO-3 optimizer and what is to be called in each step.
AFTER = {
    "none": lambda zero, look: None,
    "scheduled step": lambda zero, look: torch.optim.lr_scheduler.LinearLR(zero.optimizer),
    "pre-hook": lambda zero, look: zero.optimizer.register_step_pre_hook(lambda *_: look()),
    "step of the optimizer": lambda zero, look: on_instance("step")(zero.optimizer, look),
    "clip": on_instance("unscale_and_clip_grads"),
}
#: Called with what is to be called in each step; in force from before the engine is made.
AROUND = {
    "pre-hook of all": functools.partial(registered, register_optimizer_step_pre_hook),
    "step of the class": functools.partial(replaced, AdamW, "step"),
    "end of the class": functools.partial(replaced, ZeroOptimizer, "_post_step"),
    "function of the module": functools.partial(replaced, stage3, "see_memory_usage"),
    "mode": Mode,
}
UNKNOWN = [*[kind for kind in AFTER if kind not in ("none", "scheduled step")], *AROUND, "subclass", "other optimizer"]
KINDS = ["none", "scheduled step", *UNKNOWN]


def subclass(look):
    class Subclass(ZeroOptimizer):  # type: ignore[valid-type]
        def unscale_and_clip_grads(self, sub_group_id, total_norm):
            look()
            super().unscale_and_clip_grads(sub_group_id, total_norm)

    return Subclass


def train(kind, simulated, attached):
    watched, seen = [], []

    def look():
        """Reads the first partition, and changes the first master, as a projection or an average of weights does."""
        if watched:
            partition, master = watched
            seen.append(partition.float().norm().item())
            master.data.clamp_(max=0.1)

    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 4000,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
        },
    }
    optimizer = (Looking if kind == "other optimizer" else AdamW)(model.parameters(), lr=1e-2)
    Looking.look = staticmethod(look)
    with AROUND[kind](look) if kind in AROUND else contextlib.nullcontext():
        if kind == "subclass":
            stage3.DeepSpeedZeroOptimizer_Stage3 = subclass(look)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        stage3.DeepSpeedZeroOptimizer_Stage3 = ZeroOptimizer
        zero = engine.optimizer
        for partition in zero.fp16_partitioned_groups_flat:
            simulated.adopt(partition)
        if kind in AFTER:
            AFTER[kind](zero, look)
        said, waited = [], []
        if attached:
            handler = logging.Handler()
            handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
            logging.getLogger("transfer").addHandler(handler)
            transfer = zero3.attach(engine, build_transfer(DIRECT, simulated))
            copy = transfer.copy
            transfer.copy = lambda *pair: (waited.append(pair[0].numel()), copy(*pair))
        watched += [zero.fp16_partitioned_groups_flat[0], zero.fp32_partitioned_groups_flat[0]]
        generator = torch.Generator().manual_seed(3)
        for _ in range(STEPS):
            loss = engine(torch.randn(2, WIDTH, generator=generator).bfloat16()).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
        watched.clear()
    result = {"seen": seen, "partitions": [each.tolist() for each in zero.fp16_partitioned_groups_flat]}
    if attached:
        logging.getLogger("transfer").removeHandler(handler)
        copies = sum(counts.copies for counts in transfer.stats().values())
        result |= {"said": said, "waited": len(waited), "copies": copies}
        zero3.detach(engine)
        transfer.close()
    engine.destroy()
    return result


def main():
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    simulated = SimulatedAccelerator(seed=1)
    deepspeed.accelerator.set_accelerator(simulated.as_deepspeed())
    meeting = Path(sys.argv[1]).with_suffix(".meeting")
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    deepspeed.init_distributed()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    logging.getLogger("transfer").setLevel(logging.INFO)
    results = {kind: [train(kind, simulated, attached) for attached in (False, True)] for kind in KINDS}
    Path(sys.argv[1]).write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the process at its end


if __name__ == "__main__":
    main()
