"""One rank of the ZeRO-3 comparisons: trains models under several transfers, saves what each of them got.

Usage, under torch.distributed.run: ``worker.py SPECS.json OUT``. The file holds a mapping from a name to a spec, of
which each holds ``accelerator`` (the same for all), ``dtype``, ``optimizer`` (``AdamW`` or ``DeepSpeedCPUAdam``),
``zero`` and ``offload_optimizer`` (more of these sections), ``deepspeed`` (more of the whole config), ``width`` of the
model, ``look_between`` (whether everything that reads the model between steps is called there), ``rewind`` (a folder,
if a checkpoint of the first step is to be loaded after the third), ``resume`` (such a folder, to begin with that
checkpoint), and ``runs``: a name for each, and how its copies are done.
"""

import gc
import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

import accelerators
from accelerators.simulated import SimulatedAccelerator
from transfer import InFlightCopy, PinnedStagedTransfer, build_transfer, zero3
from transfer.zero3 import patching, tiles
from transfer.zero3.attachments import attachments

STEPS = 3
#: Masters here are small: let them be updated in tiles all the same.
tiles.ALIGNMENT_ELEMENTS = 1024
tiles.default_tile_elements = lambda: 1024
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}


class ForgetsToWait(PinnedStagedTransfer):
    """What the deferred copy would be without the wait: must be noticed."""

    def submit(self, destination, source):
        super().submit(destination, source)
        return InFlightCopy()


def main():
    specs = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    simulated = {name: simulate(spec) for name, spec in specs.items() if spec["accelerator"] == "simulated"}
    if not simulated:
        torch.cuda.set_device(local_rank)
    importlib.import_module("tests.zero3.ready")
    for number, (name, spec) in enumerate(specs.items()):
        if simulated:
            deepspeed.accelerator.set_accelerator(simulated[name].as_deepspeed())
            # torch computes in it on any CPU; DeepSpeed asks whether the CPU does so fast.
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        if number == 0:
            deepspeed.init_distributed()
        for run in spec["runs"]:
            torch.save(train(spec, run, simulated.get(name), rank), out / f"{name}-{run['name']}-{rank}.pt")
            if number == 0:
                gc.collect()
                gc.freeze()  # DeepSpeed collects garbage for each engine, and would look through all modules
    torch.distributed.barrier()
    # gloo's threads sometimes abort the process at its end, with or without this project.
    sys.stderr.flush()
    os._exit(0)


def simulate(spec):
    return SimulatedAccelerator(seed=spec.get("seed", 0), eager=spec.get("eager", False))


def train(spec, run, simulated, rank):
    tiles.default_tile_elements = lambda: spec.get("tile_elements", 1024)
    torch.manual_seed(7)
    dtype = DTYPES[spec["dtype"]]
    width = spec.get("width", 128)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), *layers[1:])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 20_000,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, **spec.get("offload_optimizer", {})},
            **spec.get("zero", {}),
        },
    }
    if spec["dtype"] == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 128}
        if spec.get("overflows"):
            config["fp16"] = {"enabled": True, "initial_scale_power": 28, "hysteresis": 1}
    elif spec["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    else:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    config.update(spec.get("deepspeed", {}))
    if run.get("section"):
        config["host_to_device_transfer"] = run["section"]
    if spec["optimizer"] == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    how = run["how"]
    if how == "install":
        zero3.install(run.get("transfer"))
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    stage3 = engine.optimizer
    if simulated is not None and not spec.get("partitions_on_host"):
        on_device = [partition for partition in stage3.fp16_partitioned_groups_flat if partition is not None]
        if stage3.offload_param:
            on_device = [parameter.ds_tensor for parameter in model.parameters() if parameter.ds_persist]
        if not stage3.offload_optimizer:
            on_device += stage3.fp32_partitioned_groups_flat
        for partition in on_device:
            simulated.adopt(partition)
    transfer = None
    if how == "install":
        transfer = attachments.get(stage3).transfer
    elif how == "attach":
        transfer = zero3.attach(engine, build_transfer(run.get("transfer")))
    elif how == "section":
        transfer = zero3.attach(engine)
    elif how == "forgets_to_wait":
        transfer = zero3.attach(engine, ForgetsToWait(chunk_elements=1000))
    submitted, waited = count_calls(transfer)
    losses, seen, skipped = [], [], 0
    if spec.get("resume"):
        engine.load_checkpoint(str(Path(spec["resume"], run["name"])))
        seen += [partition.cpu().clone() for partition in stage3.fp16_partitioned_groups_flat]
    generator = torch.Generator().manual_seed(100 + rank)
    for number in range(spec.get("steps", STEPS)):
        batch = torch.randn(2, width, generator=generator).to(engine.device, dtype)
        loss = engine(batch).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        skipped += bool(getattr(stage3, "overflow", False))
        if spec.get("look_between"):
            seen += look(engine, model, batch, number, Path(spec["look_between"], f"{run['name']}-{number}"))
        if spec.get("rewind"):
            seen += rewind(engine, number, Path(spec["rewind"], run["name"]))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    partitions = [each.cpu().clone() for each in stage3.fp16_partitioned_groups_flat if each is not None]
    on_host = [not accelerators.get_accelerator().on_device(p) for p in stage3.fp32_partitioned_groups_flat]
    pinned = transfer.pinned_bytes if transfer is not None else 0
    page_locked = transfer.page_locked_bytes if transfer is not None else 0
    host_master_bytes = sum(
        p.untyped_storage().nbytes()
        for p, here in zip(stage3.fp32_partitioned_groups_flat, on_host, strict=True)
        if here
    )
    engine.destroy()
    result = {
        "parameters": parameters,
        "partitions": partitions,
        "digest": hashlib.sha256(b"".join(p.view(torch.uint8).numpy().tobytes() for p in parameters)).hexdigest(),
        "losses": losses,
        "seen": seen,
        "skipped": skipped,
        "stats": {name: vars(counts) for name, counts in transfer.stats().items()} if transfer is not None else {},
        "sub_groups": len(stage3.fp32_partitioned_groups_flat),
        "masters_on_host": sum(on_host),
        "submitted": len(submitted),
        "waited_at_once": len(waited),
        "optimizer": spec["optimizer"],
        "pinned_bytes": pinned,
        "page_locked_bytes": page_locked,
        "host_master_bytes": host_master_bytes,
        "pinned_bytes_after_destroy": transfer.pinned_bytes if transfer is not None else 0,
        "world_size": int(os.environ["WORLD_SIZE"]),
    }
    if how == "install":
        zero3.uninstall()
    result["patches_left"] = len(patching.active)
    return result


def look(engine, model, batch, number, path):
    """What each of DeepSpeed's ways to read the model says now; after the second step, from a checkpoint too."""
    engine.eval()
    with torch.no_grad():
        seen = [engine(batch).cpu().clone()]
    engine.train()
    parameter = next(model.parameters())
    seen.append(deepspeed.utils.safe_get_full_fp32_param(parameter).cpu().clone())
    seen.append(deepspeed.utils.safe_get_local_fp32_param(parameter).cpu().clone())
    if number == 1:
        engine.save_checkpoint(str(path))
        engine.load_checkpoint(str(path))
    seen += [partition.cpu().clone() for partition in engine.optimizer.fp16_partitioned_groups_flat]
    return seen


def rewind(engine, number, path):
    """Saves after the first step; after the third, goes back to it and returns what the partitions hold then."""
    if number == 0:
        engine.save_checkpoint(str(path))
    if number != 2:
        return []
    engine.load_checkpoint(str(path))
    return [partition.cpu().clone() for partition in engine.optimizer.fp16_partitioned_groups_flat]


def count_calls(transfer):
    """Every copy that ZeRO-3 asks for adds to the first of the lists returned, one by ``copy`` to the second too."""
    submitted, waited = [], []
    if transfer is not None:
        submit, copy = transfer.submit, transfer.copy

        def counting_submit(destination, source):
            submitted.append(destination.numel())
            return submit(destination, source)

        def counting_copy(destination, source):
            before = len(submitted)
            waited.append(destination.numel())
            copy(destination, source)
            if len(submitted) == before:  # `copy` asks `submit` only where a subclass has its own
                submitted.append(destination.numel())

        transfer.submit, transfer.copy = counting_submit, counting_copy
    return submitted, waited


if __name__ == "__main__":
    main()
