"""Real ZeRO-3 with CPU Adam on several ranks, by DeepSpeed alone and with gradients that go to the host once.

Usage: ``training.py OUT ACCELERATOR``, on ranks as a launcher starts them. Writes what was seen on the way, for each
case with ours, and once for all that are the same without: losses, gradients that were asked for, weights and moments
at the end. Real elements only: the padding of a master is uninitialised memory in DeepSpeed.
"""

import dataclasses
import gc
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.swap_tensor import optimizer_utils
from torch.utils.checkpoint import checkpoint

from accelerators import get_accelerator
from accelerators.simulated import SimulatedAccelerator
from tests.zero3 import python_aio
from transfer import build_transfer, zero3
from transfer.zero3 import tiles
from transfer.zero3.attachments import attachments

#: Masters here are small: let them be updated in tiles all the same.
tiles.ALIGNMENT_ELEMENTS = 1024
tiles.default_tile_elements = lambda: 1024
#: And swapped.
optimizer_utils.MIN_AIO_BYTES = 4096
DIRECT = {"strategy": "pinned_direct", "fallback": False}
WIDTH, LAYERS, STEPS = 47, 4, 4
#: DeepSpeed's state is in files after the first step, and passes through ours from then on.
NVME_STEPS = 5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Model(torch.nn.Module):
    """Layers that are used or not.

    The last parameter has one element, so that all ranks but one have no part of it. DeepSpeed sets gradients only of
    parameters that are divisible by the ranks, as ``shift`` and ``gain`` are.
    """

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.shift, self.gain = (torch.nn.Parameter(torch.ones(2, WIDTH)) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.ones(1))

    #: Whether the first layer is computed anew in backward: where it is used again, it is reduced twice there.
    checkpoints = False

    def forward(self, values, used):
        if self.checkpoints:
            values.requires_grad_()
        for index in used:
            layer = self.layers[index]
            again = self.checkpoints and index == used[0]
            part = checkpoint(layer, values, use_reentrant=True) if again else layer(values)
            values = torch.relu(part) + values
        return (values + self.shift) * self.gain * self.scale


class Run:
    """One training of a case; see ``CASES``."""

    def __init__(self, case, attached, seed, accelerator="simulated"):
        self.case, self.attached, self.seen = case, attached, []
        self.rank = int(os.environ["RANK"])
        self.bytes = python_aio.use() if case.get("nvme") else {}
        self.device = torch.device("cpu")
        if accelerator == "simulated":
            self.accelerator = SimulatedAccelerator(seed=seed, eager=bool(seed % 2))
            deepspeed.accelerator.set_accelerator(self.accelerator.as_deepspeed())
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        else:
            self.accelerator = get_accelerator(accelerator)
            self.device = torch.device(accelerator, torch.cuda.current_device())
        torch.manual_seed(1)
        self.model = Model()
        self.model.checkpoints = case.get("checkpoints", False)
        for index in case.get("frozen", ()):
            self.model.layers[index].requires_grad_(False)
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        groups = [{"params": self.parameters}]
        if case.get("groups"):
            weights = [each for each in self.parameters if each.dim() == 2]
            others = [each for each in self.parameters if each.dim() != 2]
            groups = [{"params": weights}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}]
        optimizer = DeepSpeedCPUAdam(groups, lr=1e-2, weight_decay=0.1)
        if attached and case.get("install") and not case.get("attach_at"):
            zero3.install(DIRECT)
        self.engine = deepspeed.initialize(model=self.model, optimizer=optimizer, config=self.config())[0]
        self.zero = self.engine.optimizer
        for partition in self.zero.fp16_partitioned_groups_flat:
            if partition is not None and accelerator == "simulated" and not case.get("on_host"):
                self.accelerator.adopt(partition)
        if attached and not case.get("attach_at") and not case.get("install"):
            self.attach()

    def config(self):
        case = self.case
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": case.get("micro_steps", 1),
            "gradient_clipping": case.get("clip", 0.01),
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": case.get("sub_group", 4000),
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": self.offload(),
                **case.get("zero", {}),
            },
        }
        if case.get("nvme"):
            config["aio"] = {"block_size": 4096}
        dtype = case.get("dtype", "bf16")
        if dtype == "fp16":
            static = {"loss_scale": 1024}
            config["fp16"] = {"enabled": True, **case.get("fp16", static)}
        elif dtype == "bf16":
            config["bf16"] = {"enabled": True}
        config.update(case.get("deepspeed", {}))
        return config

    def offload(self):
        if not self.case.get("nvme"):
            return {"device": "cpu", "pin_memory": self.case.get("pin", True), **self.case.get("offload", {})}
        folder = Path(os.environ["CHECKPOINTS"], "swap", self.case["name"], str(self.attached))
        pipeline = {"pipeline_read": True, "pipeline_write": True} if self.case["nvme"] == "pipelined" else {}
        return {"device": "nvme", "nvme_path": str(folder), "buffer_count": 12, "pin_memory": True, **pipeline}

    def attach(self):
        if self.case.get("install"):
            zero3.install(DIRECT)
            return
        transfer = {**self.case.get("transfer", DIRECT)}
        if "zero3" in transfer:
            paths = transfer["zero3"].get("paths", [])
            folders = [each.replace("CHECKPOINTS", os.environ["CHECKPOINTS"]) for each in paths]
            transfer["zero3"] = {**transfer["zero3"], "paths": folders}
        zero3.attach(self.engine, build_transfer(transfer, self.accelerator))

    @property
    def gradients(self):
        attachment = attachments.get(self.zero)
        return None if attachment is None else attachment.gradients

    def train(self):
        case, generator = self.case, torch.Generator().manual_seed(5 + self.rank)
        micro_steps, managed = case.get("micro_steps", 1), case.get("managed", True)
        for step in range(case.get("steps", NVME_STEPS if case.get("nvme") else STEPS)):
            for micro_step in range(micro_steps):
                used = case.get("used", lambda *_: range(LAYERS))(step, micro_step)
                batch = torch.randn(2, WIDTH, generator=generator).to(self.device, DTYPES[case.get("dtype", "bf16")])
                loss = self.engine(batch, used).float().pow(2).mean()
                self.engine.backward(loss)
                self.see("loss", loss)
                self.do("backward", step, micro_step)
                if managed or micro_step == micro_steps - 1:
                    self.engine.step()
            self.do("step", step, 0)
        return self.end()

    def do(self, *moment):
        if self.attached and self.case.get("attach_at") == moment:
            self.attach()
        ours = self.case.get("ours", {}) if self.attached else {}
        for actions in (ours, self.case.get("do", {})):
            for action in actions.get(moment[0], ()):
                action(self, *moment[1:])

    def see(self, name, *values):
        self.seen += [(name, None if value is None else value.detach().cpu().clone()) for value in values]

    def end(self):
        case, get = self.case, deepspeed.utils
        for parameter in self.parameters:
            self.see("weight", get.safe_get_full_fp32_param(parameter))
            self.see("moments", *(get.safe_get_full_optimizer_state(parameter, k) for k in ("exp_avg", "exp_avg_sq")))
        self.see("skipped", torch.tensor(self.engine.skipped_steps))
        self.accelerator.synchronize()
        parameters: list[Any] = self.parameters
        pairs = zip(self.zero.fp16_partitioned_groups_flat, self.zero.fp32_partitioned_groups_flat, strict=True)
        if case.get("nvme"):
            # One after the other: each is read into the same swap buffer.
            pairs = ((each.ds_tensor, deepspeed.utils.safe_get_local_fp32_param(each)) for each in parameters)
        copied = [same_bits(partition, master.detach().to(partition.dtype)) for partition, master in pairs]
        gradients, result = self.gradients, {"seen": self.seen, "copied": copied, "bytes": dict(self.bytes)}
        if gradients is not None:
            real = [taken.memory is not None for taken in gradients._masters.values()]
            stream = attachments.get(self.zero).states._stream
            result["resident_bytes"] = 0 if stream is None else stream.resident_bytes
            result |= {"real": sum(real), "lazy": len(real) - sum(real), "buffers": len(gradients._buffers)}
        self.engine.destroy()
        zero3.uninstall()
        return result


def same_bits(one, other):
    width = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.detach().cpu().view(width), other.cpu().view(width))


def look(run, *_):
    """Everything that DeepSpeed tells of gradients."""
    for parameter in run.parameters:
        run.see("full", deepspeed.utils.safe_get_full_grad(parameter))
        part = parameter.ds_tensor.numel()
        real = min(part, max(0, parameter.ds_numel - part * run.rank))  # the rest of a swap buffer is undefined
        run.see("local", deepspeed.utils.safe_get_local_grad(parameter)[:real])


@dataclasses.dataclass(frozen=True)
class at:  # noqa: N801 - reads as what it does
    """``action`` after the last micro-step of one step."""

    step: int
    action: Callable

    def __call__(self, run, now, micro_step):
        if now == self.step and micro_step == run.case.get("micro_steps", 1) - 1:
            self.action(run)


def set_full(run):
    parameter = run.model.shift
    values = torch.linspace(-1, 1, parameter.ds_numel, device=run.device).view(parameter.ds_shape)
    deepspeed.utils.safe_set_full_grad(parameter, values)


def set_local(run):
    parameter = run.parameters[0]
    values = torch.linspace(-1, 1, parameter.ds_tensor.numel(), device=run.device)
    deepspeed.utils.safe_set_local_grad(parameter, values)


def update_vectorized(run):
    update = getattr(run.zero, "update_fp32_grad_for_param_vectorized", None)
    if update is not None:
        update(lambda gradient, _: gradient * 0.5 + 0.25, [run.model.shift, run.model.gain])


def step_again(run):
    """A step without a backward: DeepSpeed applies the old gradients, times all factors since."""
    run.zero.step()


def see_state(run):
    """Reads masters and moments, and writes one of each."""
    get = deepspeed.utils
    for parameter in run.parameters:
        run.see("weight", get.safe_get_full_fp32_param(parameter))
        run.see("moment", get.safe_get_full_optimizer_state(parameter, "exp_avg"))
    get.safe_set_full_fp32_param(run.model.shift, torch.ones(run.model.shift.ds_shape))
    get.safe_set_full_optimizer_state(run.model.shift, torch.ones(run.model.shift.ds_shape), "exp_avg_sq")


def read_directly(run):
    """What a user's code may do with the gradients of masters, which is nothing that DeepSpeed has a name for."""
    master = run.zero.fp32_partitioned_groups_flat[0]
    run.see("norm", master.grad.norm(), torch.isnan(master.grad).any(), master.grad[3:7] + 1)


def write_directly(run):
    master = run.zero.fp32_partitioned_groups_flat[0]
    master.grad[2:5].add_(1)
    master.grad.view(-1, 1)[7] = 3.0


def other_defaults(run, *_):
    """A user's own, while a step is made. DeepSpeed's swapping does without another dtype."""
    torch.set_default_device("meta")
    if not run.case.get("nvme"):
        torch.set_default_dtype(torch.bfloat16)


def usual_defaults(*_):
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def see_in_hook(run):
    def look_at(optimizer, *_):
        run.see("hook", *(each.grad.sum() for group in optimizer.param_groups for each in group["params"]))

    run.zero.optimizer.register_step_pre_hook(look_at)


def reattach(run):
    zero3.attach(run.engine, build_transfer({"strategy": "pinned_staged", "fallback": False}, run.accelerator))


def detach(run):
    zero3.detach(run.engine)


def save_and_load(run):
    path = Path(os.environ["CHECKPOINTS"], f"{run.case['name']}-{run.attached}")
    run.engine.save_checkpoint(str(path))
    run.engine.load_checkpoint(str(path))


def odd_windows(step, _):
    """Two layers are used in every other window only."""
    return (0, 2) if step % 2 else range(LAYERS)


def not_at_the_boundary(step, micro_step):
    """In every third window, two layers are reduced before the last micro-step and not in it, one only then."""
    if step % 3 == 1:
        return (0, 1, 2) if micro_step == 0 else (0, 3)
    return odd_windows(step, micro_step)


#: DeepSpeed takes a parameter twice only where the bucket was reduced in between.
SMALL_BUCKETS = {"reduce_bucket_size": 1000}
OVERFLOWS = {"initial_scale_power": 14, "hysteresis": 1, "loss_scale_window": 3}
LOOKS = {"backward": [look], "step": [look]}
#: What a case says of the attached training alone: those that differ in nothing else share one of DeepSpeed alone.
OURS = {"name", "attach_at", "install", "transfer", "ours", "real", "resident"}
#: Of each: how it trains, and how many sub-groups have a real gradient at its end: "all", or None without any of ours.
CASES: dict[str, dict] = {
    "bf16": {},
    "bf16, clipping does not act": {"clip": 1e6},
    "bf16, no clipping": {"clip": 0.0},
    "fp16": {"dtype": "fp16"},
    "fp16, overflows": {"dtype": "fp16", "fp16": OVERFLOWS, "steps": 8},
    "fp32": {"dtype": "fp32"},
    "fp32 accumulation": {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}, "micro_steps": 2},
    "not pinned": {"pin": False, "micro_steps": 2},
    "one sub-group": {"sub_group": 10**9},
    "groups": {"groups": True},
    "frozen": {"frozen": [1]},
    "no reduce-scatter": {"zero": {"reduce_scatter": False}, "micro_steps": 2},
    "four micro-steps": {"micro_steps": 4},
    "unused layers": {"used": odd_windows, "steps": 8, "do": LOOKS},
    "unused layers, fp16": {"used": odd_windows, "dtype": "fp16"},
    "unused layers, micro-steps": {"used": not_at_the_boundary, "micro_steps": 3, "steps": 6, "do": LOOKS},
    "unused layers, micro-steps, fp16, overflows": {
        "used": not_at_the_boundary,
        "micro_steps": 3,
        "dtype": "fp16",
        "fp16": OVERFLOWS,
        "steps": 8,
    },
    "the caller accumulates": {
        "used": not_at_the_boundary,
        "micro_steps": 3,
        "steps": 6,
        "managed": False,
        "do": LOOKS,
    },
    "reduced twice": {
        "checkpoints": True,
        "zero": SMALL_BUCKETS,
        "used": lambda *_: (0, 1, 0, 2),
        "do": {"backward": [look]},
    },
    "reduced twice, micro-steps": {
        "checkpoints": True,
        "zero": SMALL_BUCKETS,
        "used": lambda step, micro_step: (0, 1, 0, 2) if micro_step != 1 or step % 2 else (3, 1),
        "micro_steps": 3,
        "do": LOOKS,
    },
    "steps without backward": {"do": {"step": [at(0, step_again), at(1, step_again), look]}},
    "set": {"do": {"backward": [at(1, set_full), at(2, set_local), at(3, update_vectorized), look], "step": [look]}},
    "set, micro-steps": {"do": {"backward": [at(1, set_full), look], "step": [look]}, "micro_steps": 2},
    "read directly": {"do": {"backward": [at(1, read_directly)], "step": [at(2, read_directly)]}},
    "written directly": {"do": {"backward": [at(1, write_directly), look]}, "real": 1},
    "other defaults": {
        "do": {"backward": [other_defaults, look, at(3, write_directly)], "step": [look, usual_defaults]},
        "real": 1,
    },
    "hook": {"do": {"backward": [at(1, see_in_hook)]}, "real": "all"},
    "attached between backward and step": {"attach_at": ("backward", 2, 0), "do": LOOKS},
    "attached after a step": {"attach_at": ("step", 2, 0), "used": odd_windows, "steps": 8, "do": LOOKS},
    "attached again": {"ours": {"backward": [at(2, reattach)]}, "do": LOOKS},
    "installed": {"install": True, "micro_steps": 2, "do": {"backward": [look]}},
    "installed between backward and step": {"install": True, "attach_at": ("backward", 2, 0), "do": LOOKS},
    "detached": {
        "ours": {"backward": [at(2, detach)]},
        "micro_steps": 2,
        "do": {"backward": [look]},
        "real": None,
    },
    "checkpoint": {"do": {"backward": [at(2, save_and_load)], "step": [at(3, save_and_load)]}},
    "waits at once": {"transfer": {**DIRECT, "completion": "immediate"}, "real": None},
    "offloaded parameters": {"zero": {"offload_param": {"device": "cpu", "pin_memory": True}}, "on_host": True},
    # What DeepSpeed's swap buffers hold of a small parameter that was not reduced is undefined.
    "nvme": {"nvme": True, "do": {"backward": [look]}},
    "nvme, pipelined": {"nvme": "pipelined", "do": {"backward": [look]}},
    "nvme, no clipping": {"nvme": True, "clip": 0.0},
    "nvme, fp16, overflows": {"nvme": True, "dtype": "fp16", "fp16": OVERFLOWS, "steps": 8},
    "nvme, fp32": {"nvme": True, "dtype": "fp32"},
    "nvme, micro-steps": {"nvme": "pipelined", "micro_steps": 3, "do": {"backward": [at(1, look), at(3, look)]}},
    "nvme, the caller accumulates": {"nvme": True, "micro_steps": 3, "managed": False},
    "nvme, groups": {"nvme": True, "groups": True},
    "nvme, one sub-group": {"nvme": True, "sub_group": 10**9},
    "nvme, frozen": {"nvme": True, "frozen": [1]},
    "nvme, other defaults": {"nvme": True, "do": {"backward": [other_defaults], "step": [usual_defaults]}},
    "nvme, set": {
        "nvme": True,
        "do": {"backward": [at(1, set_full), at(2, set_local), at(3, update_vectorized), look]},
    },
    "nvme, attached between backward and step": {
        "nvme": True,
        "attach_at": ("backward", 2, 0),
        "do": {"backward": [look]},
    },
    "nvme, attached after a step": {"nvme": "pipelined", "attach_at": ("step", 2, 0), "do": {"backward": [look]}},
    "nvme, attached again": {"nvme": True, "ours": {"backward": [at(2, reattach)]}, "do": {"backward": [look]}},
    "nvme, installed": {
        "nvme": "pipelined",
        "install": True,
        "micro_steps": 3,
        "do": {"backward": [at(1, look), at(3, look)]},
    },
    "nvme, detached": {
        "nvme": True,
        "ours": {"backward": [at(2, detach)]},
        "do": {"backward": [look]},
        "real": None,
    },
    "nvme, checkpoint": {
        "nvme": True,
        "do": {"backward": [at(4, look)], "step": [at(1, save_and_load), at(3, save_and_load)]},
        "steps": 7,
    },
    "nvme, half resident": {
        "nvme": True,
        "transfer": {**DIRECT, "zero3": {"host_memory": "30KiB"}},
        "do": {"backward": [at(4, look)], "step": [at(1, save_and_load), at(3, save_and_load)]},
        "resident": True,
        "steps": 7,
    },
    "nvme, resident, set": {
        "nvme": True,  # pipelined, DeepSpeed alone fails on one rank where gradients are set
        "transfer": {**DIRECT, "zero3": {"host_memory": "1MiB", "paths": ["CHECKPOINTS/second", "CHECKPOINTS/third"]}},
        "do": {"backward": [at(3, set_full), at(4, set_local), at(5, update_vectorized)], "step": [at(5, see_state)]},
        "resident": True,
        "steps": 8,
    },
}


def trained_alone_as(name):
    """The first case that is the same without all of ours."""
    without = {each: {key: value for key, value in CASES[each].items() if key not in OURS} for each in CASES}
    return next(each for each in CASES if without[each] == without[name])


def main():
    out, accelerator, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    if accelerator == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    importlib.import_module("tests.zero3.ready")
    for number, (name, case) in enumerate(CASES.items()):
        case["name"] = name.replace(" ", "_")
        for attached in (False, True):
            if attached or trained_alone_as(name) == name:
                torch.save(Run(case, attached, number, accelerator).train(), out / f"{name}-{attached}-{rank}.pt")
                gc.collect()
                gc.freeze()  # DeepSpeed collects garbage for each engine, and would look through all that is left
    torch.distributed.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort the process at its end, with or without this project


if __name__ == "__main__":
    main()
