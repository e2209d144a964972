"""Every copy of training state from host to device that ZeRO-3 makes: where, and whether the interface makes it.

``COPY_SITES`` is what ``attach`` speaks of, what the documentation's table is made from (``table``), and what a test
holds against the source of the installed DeepSpeed: each function is there, and no other function of ZeRO-3 copies.

P is the number of a rank's parameters, a micro-step is one forward and backward pass. Rates are of one H200.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .optimizer import Stage3

SERVED, LEFT, IMPOSSIBLE = "served", "left alone", "impossible"

_ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."
_PARAMETERS = "deepspeed.runtime.zero.partition_parameters:"
_GATHERS = f"{_PARAMETERS}Init._convert_to_deepspeed_param."
_SUPER = "deepspeed.runtime.superoffload.superoffload_stage3:SuperOffloadOptimizer_Stage3."
_ZENFLOW = "deepspeed.runtime.zenflow.engine_stage3:"
_SELECTIVE = "deepspeed.ops.adam.zenflow_torch_adam:"
_STATES = "deepspeed.runtime.zero.offload_states:"
_COMPILED = "deepspeed.compile.passes.offload_adam_states:"
_ALL = ("0.16.0", "0.19.8")

_PINNED = "its source is pinned and has the dtype of the destination, so it goes at the link's rate: 55.3 GB/s"


@dataclass(frozen=True)
class Site:
    """Copies that DeepSpeed makes for one purpose.

    Attributes:
        name: A few words, for a line.
        functions: Where: ``module:qualified name`` of each function, with the number of its calls that copy so.
        versions: The first and the last version of DeepSpeed in which it was read.
        what: What is copied, how much, and how often.
        answer: ``SERVED``, ``LEFT`` or ``IMPOSSIBLE``.
        reason: How it is served, or why it is not.
        is_of: Whether an engine has these copies; None for what ``attach`` says otherwise, for what happens before
            there is an engine to attach to, and for what is too small to be spoken of.
    """

    name: str
    functions: Mapping[str, int]
    versions: tuple[str, str]
    what: str
    answer: str
    reason: str
    is_of: Callable[[Stage3], bool] | None = None


def _offloads(stage3: Stage3) -> bool:
    return stage3.keeps_masters_in_memory or stage3.swaps


def _has(name: str) -> Callable[[Stage3], bool]:
    return lambda stage3: bool(getattr(stage3.optimizer, name, False))


COPY_SITES: tuple[Site, ...] = (
    Site(
        "copy-back",
        {f"{_ZERO3}_reassign_or_swap_out_partitioned_parameters": 1},
        _ALL,
        "fp32 masters to the 16-bit partitions; 4P bytes a step",
        SERVED,
        "in tiles behind CPU Adam, waited for at the end of the step; from swap buffers or files for state on NVMe",
    ),
    Site(
        "SuperOffload's copy-back",
        {f"{_SUPER}_reassign_or_swap_out_partitioned_parameters": 2},
        ("0.18.9", "0.19.8"),
        "fp32 masters in shared memory to the 16-bit partitions; 4P bytes a step",
        SERVED,
        "behind the updates of later sub-groups, waited for at the end of the step; page-locked once it is shared",
    ),
    Site(
        "ZenFlow's copy-back",
        {f"{_ZENFLOW}wait_last_update_and_copy": 1},
        ("0.18.9", "0.19.8"),
        "with `overlap_step`: the masters of the update before, in shared memory; 4P bytes an update",
        SERVED,
        "each waits, as DeepSpeed's does; page-locked. Without `overlap_step`, ZenFlow makes the copy-back of ZeRO-3",
        _has("zenflow_overlap_step"),
    ),
    Site(
        "gradients",
        {f"{_ZERO3}partition_grads": 2},
        _ALL,
        "16-bit gradients back to the device, for the sum and the norm; 2P bytes a micro-step",
        SERVED,
        "none in the first micro-step, as the gradient is on the device still; later ones come through the interface. "
        "From 0.19.3 on, with CPU Adam; else they are DeepSpeed's, pinned by default from 0.19.5 on",
    ),
    Site(
        "gradients that the caller accumulates",
        {f"{_ZERO3}_finalize_offload_gradient_accumulation": 1},
        ("0.19.5", "0.19.8"),
        "with `managed_gradient_accumulation: false`: 2P bytes a step",
        SERVED,
        "as the gradients above",
    ),
    Site(
        "Muon's momentum",
        {f"{_ZERO3}_apply_muon_updates_cpu_offload": 2},
        ("0.19.8", "0.19.8"),
        "gradients and momentum of Muon's parameters to the device; up to 8 bytes of each of its elements a step",
        SERVED,
        f"the momentum, which is pageable. The gradient is left alone where it is pinned, the default: {_PINNED}",
        lambda stage3: _offloads(stage3) and _has("use_muon")(stage3),
    ),
    Site(
        "restore",
        {f"{_ZERO3}_rigid_load_state_dict": 1, f"{_ZERO3}load_hp_checkpoint_state_from_checkpoint_dir_stage3": 1},
        _ALL,
        "after a checkpoint, universal or not, was loaded: fp32 masters to the 16-bit partitions; 4P bytes a load",
        SERVED,
        "each waits, as DeepSpeed's does; on NVMe, the files of the masters go straight to the device",
        lambda stage3: _offloads(stage3) and not _has("offload_param")(stage3),
    ),
    Site(
        "restore of parameters alone",
        {f"{_ZERO3}load_module_checkpoint_state_from_checkpoint_dir_stage3": 1},
        ("0.19.3", "0.19.8"),
        "a universal checkpoint without optimizer state: fp32 pieces of each parameter, cast; 2P bytes a load",
        SERVED,
        "each waits, as DeepSpeed's does",
    ),
    Site(
        "reload_states",
        {f"{_ZERO3}reload_states": 5, f"{_STATES}reload_adam_states.move_back_key": 1},
        _ALL,
        "what `offload_states` has moved to the host: 2P bytes with an offloaded optimizer, up to 16P without, a call",
        SERVED,
        f"where its source is pageable and `non_blocking` is false. Else it is left alone: {_PINNED}",
        lambda stage3: not _has("offload_param")(stage3),
    ),
    Site(
        "parameter fetch",
        {
            f"{_PARAMETERS}NoGatherHandle.__init__": 2,
            f"{_PARAMETERS}NoGatherCoalescedHandle.__init__": 2,
            f"{_GATHERS}_all_gather_dtype": 2,
            f"{_GATHERS}_all_gather_sequential": 3,
            f"{_GATHERS}_all_gather_coalesced": 7,
            f"{_PARAMETERS}Init._allgather_param": 2,
            f"{_PARAMETERS}Init._allgather_params_coalesced": 2,
            f"{_PARAMETERS}Init._allgather_params_sequential": 4,
        },
        ("0.18.9", "0.19.8"),
        "with `offload_param`: 16-bit partitions, to be gathered; 2P bytes forward and 2P backward a micro-step",
        LEFT,
        f"{_PINNED} from 4 MiB on. DeepSpeed pins partitions whatever `pin_memory` says. What could be gained is the "
        "stall of small ones, of which nothing has been measured",
        _has("offload_param"),
    ),
    Site(
        "gradients of SuperOffload and ZenFlow",
        {f"{_SUPER}partition_grads": 2, f"{_ZENFLOW}partition_grads": 2},
        ("0.18.9", "0.19.8"),
        "16-bit gradients back to the device; 2P bytes a micro-step",
        LEFT,
        f"{_PINNED}, by default from 0.19.5 on. Another process reads the fp32 gradients, so that they cannot go once",
        lambda stage3: stage3.overrides_step,
    ),
    Site(
        "ZenFlow's selected columns",
        {
            f"{_SELECTIVE}ZenFlowSelectiveAdamW.copy_mv_from_cpu": 2,
            f"{_SELECTIVE}ZenFlowSelectiveAdamW_stage3.copy_mv_from_cpu": 2,
            f"{_SELECTIVE}ZenFlowSelectiveAdamW._step_with_offload.flush_bucket": 1,
            f"{_SELECTIVE}ZenFlowSelectiveAdamW_stage3._step_with_offload.flush_bucket": 1,
            f"{_SELECTIVE}ZenFlowSelectiveAdamW_stage3._selective_step_one_param": 6,
        },
        ("0.19.3", "0.19.8"),
        "moments and values of the share `topk_ratio` of the columns, a step",
        LEFT,
        "small: that share of the columns, parameter by parameter; pinned and not waited for where it is offloaded",
        lambda stage3: stage3.is_zenflow,
    ),
    Site(
        "small parameters",
        {f"{_ZERO3}_partitioned_params_swap_out": 1},
        _ALL,
        "with parameters on NVMe: the masters of those that stay on the device",
        LEFT,
        "small: each is below `stage3_param_persistence_threshold`, 200 KB of 16 bits by default",
    ),
    Site(
        "norms and flags",
        {f"{_ZERO3}get_grad_norm_direct": 2, f"{_ZERO3}has_overflow": 1},
        _ALL,
        "a few numbers a step",
        LEFT,
        "small: 4 bytes each",
    ),
    Site(
        "what DeepSpeed tells and sets",
        {
            f"{_ZERO3}_fp32_state_allgather": 1,
            f"{_ZERO3}get_fp32_grad_for_param": 1,
            f"{_ZERO3}get_full_hp_param": 1,
            f"{_ZERO3}get_local_fp32_grad_for_param": 1,
            f"{_ZERO3}get_local_fp32_param": 1,
        },
        _ALL,
        "`safe_get_full_*`, `safe_get_local_*`: 4 bytes an element of this rank's part of one parameter",
        LEFT,
        "rare and small: one parameter a call, which is gathered from all ranks next",
    ),
    Site(
        "the start",
        {
            "deepspeed.runtime.zero.utils:defragment": 1,
            f"{_ZERO3}initialize_optimizer_states": 1,
            f"{_PARAMETERS}Init._convert_to_zero_parameters": 1,
            f"{_PARAMETERS}Init._post_init_method": 1,
            f"{_PARAMETERS}CUDAQuantizer.quantize": 1,
        },
        ("0.19.3", "0.19.8"),
        "the model's parameters, when the engine is made or under `zero.Init`; once",
        LEFT,
        "rare: once, before there is an engine to attach to; 145 ms for 2^28 parameters",
    ),
    Site(
        "DeepCompile's states",
        {f"{_COMPILED}move_back_key": 1, f"{_COMPILED}move_back_hp_param": 1},
        _ALL,
        "with `offload_adam_states`: moments and masters, moved within the graph of a step",
        IMPOSSIBLE,
        "the calls are nodes of a compiled graph, and the order of its streams is the compiler's",
    ),
)


def table() -> list[tuple[str, str, str, str, str]]:
    """Rows for the documentation: what, where, which versions of DeepSpeed, the answer, the reason."""
    rows = []
    for site in COPY_SITES:
        where = ", ".join(f"`{function.rpartition(':')[2]}`" for function in site.functions)
        first, last = site.versions
        versions = first if first == last else f"{first} to {last}"
        rows.append((f"{site.name}: {site.what}", where, versions, site.answer, site.reason))
    return rows


def sites_of(stage3: Stage3) -> list[Site]:
    """The sites that an engine has and ``attach`` names."""
    return [site for site in COPY_SITES if site.is_of is not None and site.is_of(stage3)]
