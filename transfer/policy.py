"""Which strategy a copy takes, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accelerators import Accelerator

from .accelerator_choice import AcceleratorChoice
from .config_file import ConfigLike, resolve_config

#: Below this many bytes the fixed cost of staging outweighs what it gains.
SMALL_BYTES = 2**20


@dataclass(frozen=True)
class Decision:
    """What a policy picked.

    Attributes:
        strategy: A registered name.
        reason: One sentence a user can act on.
    """

    strategy: str
    reason: str


class TransferPolicy:
    """Picks a strategy for each copy from what the tensors are at that moment.

    Pure: keeps nothing about tensors seen before, pins nothing, copies nothing, warns of nothing.
    Making one calls no accelerator.

    The first match decides: a copy within one side is ``pageable``; ``rules``, in order; ``strategy``;
    under 1 MiB at the destination, an accelerator without streams, events or pinning, or a pinned source
    that needs no cast is ``pageable``; everything else is ``pinned_staged``.

    Args:
        config: As for ``build_transfer``.
        accelerator: An accelerator, a registered name, or None for the configured one.

    Raises:
        ConfigError: The configuration has mistakes.
    """

    def __init__(self, config: ConfigLike | None = None, accelerator: Accelerator | str | None = None) -> None:
        self.config = resolve_config(config)
        self._choice = AcceleratorChoice(accelerator if accelerator is not None else self.config.accelerator)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Every strategy that ``select`` can return."""
        base = (self.config.strategy,) if self.config.strategy else ("pinned_staged",)
        return tuple(dict.fromkeys(("pageable", *(rule.use for rule in self.config.rules), *base)))

    def select(self, destination: Tensor, source: Tensor) -> Decision:
        """The strategy for one copy. Takes about ten microseconds and does not block.

        Args:
            destination: Any tensor.
            source: A tensor of the same shape.

        Raises:
            AcceleratorFailedError: The accelerator is unknown or not available here.
        """
        accelerator = self._choice.resolve()
        if not accelerator.on_device(destination):
            return Decision("pageable", f"The destination is not in the memory of {accelerator.name}.")
        if not accelerator.on_host(source):
            return Decision("pageable", "The source is on the device, so this is a plain device copy.")
        pinned = accelerator.is_pinned(source)
        for index, rule in enumerate(self.config.rules):
            if rule.when.holds(destination, source, pinned):
                return Decision(rule.use, f"rules[{index}] matches ({rule.when}).")
        if self.config.strategy is not None:
            return Decision(self.config.strategy, f"The configuration says `strategy: {self.config.strategy}`.")
        size = destination.numel() * destination.element_size()
        if size < SMALL_BYTES:
            return Decision(
                "pageable", f"{size} bytes are too few for staging to pay off ({SMALL_BYTES} would be enough)."
            )
        obstacle = accelerator.capabilities.why_not("streams", "events", "pins_host_memory")
        if obstacle is not None:
            return Decision("pageable", obstacle)
        if pinned and source.dtype == destination.dtype:
            return Decision("pageable", "The source is pinned and needs no cast, so the device reads it directly.")
        return Decision("pinned_staged", "The source is cast on the host and crosses through pinned staging buffers.")
