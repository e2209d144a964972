"""The engine that ``h2d bench zero3`` measures: a transformer under ZeRO-3, its optimizer on the host."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import AcceleratorFailedError
from ...zero3.stage3 import Stage3
from .on_nvme import check_lock_limit, check_swapped, offload_section, sources
from .transformer import Transformer

#: Of every engine and peer that is measured.
LEARNING_RATE = 1e-5
CLIPPING_NORM = 1.0  # DeepSpeed's default


def start_deepspeed(accelerator: Any) -> None:
    """Lets DeepSpeed use ``accelerator``, this rank's device of it, and a process group of its kind.

    Raises:
        AcceleratorFailedError: DeepSpeed has chosen another one.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator

    # DeepSpeed reports at length, and calls collectives that newer versions of torch warn of.
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # On a CPU, init_distributed would compile an op for minutes; gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if hasattr(accelerator, "as_deepspeed"):
        set_accelerator(accelerator.as_deepspeed())
    elif get_accelerator()._name != accelerator.name:
        raise AcceleratorFailedError(
            f"DeepSpeed uses {get_accelerator()._name} in this process, not {accelerator.name}: set "
            f"DS_ACCELERATOR={accelerator.name} in the environment"
        )
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()


def make_engine(options: Mapping[str, Any], accelerator: Any) -> Any:
    """A ZeRO-3 engine with bf16 partitions on the device and fp32 masters on the host, or on NVMe.

    Raises:
        StrategyUnavailableError: State on NVMe is asked for, and cannot be there.
    """
    import deepspeed

    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": offload_section(options)}
    if options.get("offload_param"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if options.get("super_offload"):
        zero["offload_optimizer"]["super_offload"] = True
    config = {
        "train_micro_batch_size_per_gpu": options["batch"],
        "gradient_clipping": CLIPPING_NORM,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if options.get("aio"):
        config["aio"] = options["aio"]
    # Partitioned while it is built: no rank ever holds the whole model.
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Transformer(options["layers"], options["hidden"])
    parameters: list[Any] = list(model.parameters())
    share = sum(parameter.ds_tensor.numel() for parameter in parameters)
    # DeepSpeed closes a sub-group when it has reached this size, so at most as many as wanted come out.
    size = zero["sub_group_size"] = -(-share // options["sub_groups"])
    check_lock_limit(zero["offload_optimizer"], size + max(parameter.ds_tensor.numel() for parameter in parameters))
    optimizer_class: Any = torch.optim.AdamW
    if options["optimizer"] == "cpu_adam":
        optimizer_class = deepspeed.ops.adam.DeepSpeedCPUAdam
    optimizer = optimizer_class(parameters, lr=options.get("learning_rate", LEARNING_RATE))
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if options["nvme"] is not None:
        check_swapped(engine.optimizer)
    if hasattr(accelerator, "adopt"):  # simulated: DeepSpeed took host memory for the device's
        for partition in engine.optimizer.fp16_partitioned_groups_flat:
            accelerator.adopt(partition)
    return engine


def describe_engine(engine: Any) -> dict[str, Any]:
    """What the measured engine is like, on this rank."""
    optimizer = engine.optimizer
    elements = [partition.numel() for partition in optimizer.fp16_partitioned_groups_flat]
    return {
        "parameters": sum(parameter.ds_numel for parameter in engine.module.parameters()),
        "sub_group_elements": elements,
        "swapped_sub_groups": len(Stage3(optimizer).swapped()),
        "master_bytes": 4 * sum(elements),
        "source_bytes": sum(memory.nbytes for memory in sources(optimizer)),
    }
