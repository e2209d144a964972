"""Every private name of DeepSpeed that this package's ZeRO-3 part uses.

``Stage3`` is a view of one ZeRO-3 optimizer, ``Gradients`` of what it keeps of gradients. To support another version
of DeepSpeed, read what it does under these names, and change this folder, the adapter in ``accelerators`` and the range
in ``pyproject.toml``. ``NAMES`` says in which versions each name exists.
"""

from .cpu_adam import level_steps, replacing_op, updates_in_parts
from .gradients import GradientState, Parameter, computes_at_once
from .names import (
    CONFIGURE,
    COPY_BACK,
    DESTROY,
    FINALIZE,
    HAS_OVERFLOW,
    NAMES,
    PARTITION_GRADS,
    POST_STEP,
    PREPARE,
    READ,
    RELEASE,
    RESET,
    STATE_DICT,
    STEP,
    SWAP_IN,
    UPDATE,
)
from .optimizer import Stage3, SwapFile, buffers_of
from .swapped import SwappedState
from .versions import (
    deepspeed_config,
    deepspeed_version,
    engine_class,
    is_zero3,
    moved,
    optimizer_classes,
    unread_version,
    zero_config,
)

__all__ = [
    "CONFIGURE",
    "COPY_BACK",
    "DESTROY",
    "FINALIZE",
    "HAS_OVERFLOW",
    "NAMES",
    "PARTITION_GRADS",
    "POST_STEP",
    "PREPARE",
    "READ",
    "RELEASE",
    "RESET",
    "STATE_DICT",
    "STEP",
    "SWAP_IN",
    "UPDATE",
    "GradientState",
    "Parameter",
    "Stage3",
    "SwapFile",
    "SwappedState",
    "buffers_of",
    "computes_at_once",
    "deepspeed_config",
    "deepspeed_version",
    "engine_class",
    "is_zero3",
    "level_steps",
    "moved",
    "optimizer_classes",
    "replacing_op",
    "unread_version",
    "updates_in_parts",
    "zero_config",
]
