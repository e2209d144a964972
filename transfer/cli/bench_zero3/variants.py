"""What ``h2d bench zero3`` compares: DeepSpeed's copy-back, ours in every form, and none at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ... import zero3
from ...config import TransferConfig
from ...config_file import resolve_config
from ...interface import HostToDeviceTransfer
from ...registry import get_strategy
from ...routing import build_transfer
from ...zero3.attachment import Attachment
from ...zero3.stage3 import COPY_BACK, Stage3
from ..measuring.baselines import RING_CONFIG
from ..measuring.names import DEEPSPEED, NO_COPY_BACK, RING
from .on_nvme import masters
from .phases import Phases

#: Ends the name of a variant whose gradients go to the host as DeepSpeed sends them.
NO_STREAM = ", no stream"


@dataclass
class Variant:
    """One copy-back, and what was measured of it on this rank."""

    name: str
    config: TransferConfig | None = None  #: Of the transfer; None for DeepSpeed, and where nothing is copied back.
    transfer: HostToDeviceTransfer | None = None  #: Kept for the whole measurement, so that its buffers stay.
    page_locked_bytes: int = 0  #: What attaching it page-locks in place, of this rank's masters.
    selected: str | None = None  #: The strategy that has copied the first sub-group.
    attach_seconds: float | None = None  #: Of the first attach, which includes page-locking.
    phases: list[Phases] = field(default_factory=list)
    memory_rises: list[int] = field(default_factory=list)
    right_bits: bool = True

    @property
    def copies(self) -> bool:
        """Where it does not, the low-precision partitions are out of date after a step."""
        return self.name != NO_COPY_BACK

    def close(self) -> None:
        """Gives back what the transfer has pinned; a later step pins anew."""
        if self.transfer is not None:
            self.transfer.close()

    @contextlib.contextmanager
    def attached(self, engine: Any) -> Iterator[None]:
        """The block in which the engine's steps copy back this way."""
        with contextlib.ExitStack() as undoing:
            if self.transfer is not None:
                Attachment.takes_gradients = not self.name.endswith(NO_STREAM)
                undoing.callback(setattr, Attachment, "takes_gradients", True)
                zero3.attach(engine, self.transfer)
                undoing.callback(zero3.detach, engine)
            elif not self.copies:
                setattr(engine.optimizer, COPY_BACK, Stage3(engine.optimizer).unflatten)
                undoing.callback(delattr, engine.optimizer, COPY_BACK)  # the class's own is found again
            yield


def make_variants(options: Mapping[str, Any], accelerator: Any) -> list[Variant]:
    """Every variant to measure; calls no accelerator yet."""
    given = resolve_config(options["config"])
    # Without a fallback: what cannot run is listed as such, and never measured under another's name.
    ring = {"strategy": "pinned_staged", "pinned_staged": RING_CONFIG, "fallback": False}
    configs = {RING: TransferConfig(**ring, completion="immediate")}
    for strategy in (name for name in options["strategies"] if not get_strategy(name).reads_swapped):
        for completion in ("immediate", "deferred"):
            config = {"strategy": strategy, strategy: given.section(strategy), "fallback": False}
            configs[f"{strategy}, {completion}"] = TransferConfig(**config, completion=completion)
        configs[strategy + NO_STREAM] = TransferConfig(**config, completion="deferred")
    configs["default"] = TransferConfig()
    configs["default" + NO_STREAM] = TransferConfig()
    configs |= {f"default, verify: {mode}": TransferConfig(verify=mode) for mode in options["verify"]}
    if options["config"] is not None:
        configs["configured"] = given
    ours = [Variant(name, config, build_transfer(config, accelerator)) for name, config in configs.items()]
    return [Variant(DEEPSPEED), Variant(NO_COPY_BACK), *ours]


def rewrite(engine: Any) -> None:
    """Brings the low-precision partitions, and what was gathered from them, up to date by DeepSpeed's own copy."""
    optimizer, stage3 = engine.optimizer, Stage3(engine.optimizer)
    optimizer.checkpoint_event_prologue()
    for sub_group_id, master in enumerate(masters(optimizer)):
        if stage3.is_swapped(sub_group_id):
            optimizer.fp16_partitioned_groups_flat[sub_group_id].data.copy_(master)
            stage3.unflatten(sub_group_id)
        else:
            getattr(optimizer, COPY_BACK)(sub_group_id)
    optimizer.checkpoint_event_epilogue()
