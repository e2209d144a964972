"""``h2d bench zero3 --nvme``: the optimizer's state in files, and where its master partitions are then.

DeepSpeed reads the state of a sub-group into its swap buffers, updates it there, copies the master back and
writes the state to its files again. Between steps the files alone have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerators.deepspeed_aio import may_lock_bytes

from ...errors import StrategyUnavailableError
from ...nvme import SwappedTensor, swap_in
from ...registry import get_strategy
from ...zero3.stage3 import Stage3, buffers_of

#: Of the model's width. Where a parameter does not begin at a multiple of 512 bytes of its sub-group, DeepSpeed 0.19.8
#: reads its gradient into memory that O_DIRECT refuses, does not see the error, and updates by what the memory held
#: before (seen with a width of 448, in six of fifty parameters): its bits would be nobody's reference.
WIDTH_MULTIPLE = 128


def offload_section(options: Mapping[str, Any]) -> dict[str, Any]:
    """``offload_optimizer`` of the DeepSpeed config, by the options ``nvme`` and ``nvme_pipeline``."""
    if options["nvme"] is None:
        return {"device": "cpu", "pin_memory": True}
    pipelined = options["nvme_pipeline"]
    return {
        "device": "nvme",
        "nvme_path": options["nvme"],
        # Three states and a gradient, and one more. Pipelined, one sub-group is updated while the one before is written
        # and the one after is read: three times four.
        "buffer_count": 12 if pipelined else 5,
        "pipeline_read": pipelined,
        "pipeline_write": pipelined,
        "pin_memory": True,
    }


def check_lock_limit(offload: Mapping[str, Any], elements: int) -> None:
    """Refuses swap buffers for sub-groups of so many elements that the process may not lock: the op would abort it.

    Raises:
        StrategyUnavailableError: The limit on locked memory is lower.
    """
    num_bytes = offload.get("buffer_count", 0) * elements * 4
    if not may_lock_bytes(num_bytes):
        raise StrategyUnavailableError(
            f"DeepSpeed's swap buffers need {num_bytes} bytes of locked memory, which this process may not lock: "
            "raise the limit (`ulimit -l`), or give more --sub-groups"
        )


def check_swapped(optimizer: Any) -> None:
    """Refuses an engine whose state has stayed in memory.

    Raises:
        StrategyUnavailableError: No sub-group is large enough to be swapped.
    """
    if not Stage3(optimizer).swapped():
        raise StrategyUnavailableError(
            "no sub-group has its state on NVMe: DeepSpeed keeps those of fewer than 262,144 elements a rank in "
            "memory; give fewer --sub-groups or more --parameters"
        )


def masters(optimizer: Any) -> Iterator[Any]:
    """The master partition of each sub-group, as it is now, between steps: read from its file where it is in one."""
    stage3 = Stage3(optimizer)
    for sub_group_id in stage3.sub_groups:
        if stage3.is_swapped(sub_group_id):
            file = stage3.swap_file(sub_group_id)
            if file is None:
                raise StrategyUnavailableError("this version of DeepSpeed keeps its swap files in an unknown way")
            yield swap_in(SwappedTensor.from_file(file.path, file.dtype, file.numel))
        else:
            yield stage3.master(sub_group_id)


def sources(optimizer: Any) -> list[Any]:
    """The memory that copy-backs leave from: masters, or DeepSpeed's swap buffers."""
    stage3, swapped = Stage3(optimizer), Stage3(optimizer).swapped()
    in_memory = [stage3.master(sub_group_id) for sub_group_id in stage3.sub_groups if sub_group_id not in swapped]
    return in_memory + (buffers_of(stage3.buffer_manager) if swapped else [])


def as_in_a_step(optimizer: Any, sub_group_id: int, master: Any) -> Any:
    """A master where a step would have it when it is copied back; between steps the swap buffers are free."""
    stage3 = Stage3(optimizer)
    if not stage3.is_swapped(sub_group_id):
        return master
    return buffers_of(stage3.buffer_manager)[0].narrow(0, 0, master.numel()).copy_(master)


def not_for_steps(options: Mapping[str, Any]) -> list[dict[str, str]]:
    """Strategies that are no copy-back, with the reason."""
    reason = (
        "it takes values from files, and ZeRO-3 copies back from memory: a master on NVMe is read, updated and written "
        "in DeepSpeed's own swap buffers"
    )
    return [{"variant": name, "reason": reason} for name in options["strategies"] if get_strategy(name).reads_swapped]
