"""Which strategy a copy takes, and why."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from accelerators import Accelerator

from .accelerator_choice import AcceleratorChoice
from .config_file import ConfigLike, resolve_config
from .errors import MachineProfileWarning, warn_caller
from .interface import HOST_WAITS
from .measured import MachineProfile, fastest
from .measured.estimate import CANDIDATES
from .nvme import SwappedTensor
from .registry import MEASURED, get_strategy
from .strategies import PinnedDirectConfig

#: What reads files; it is not asked for tensors.
NVME_SWAPPED = "nvme_swapped"
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

    Pure: keeps nothing about tensors seen before, pins nothing, copies nothing. Making one calls no
    accelerator. With ``strategy: measured`` it reads the machine's profile when it is made; where
    there is none, or one of another machine, the first ``select`` warns once and the default policy applies.

    Values in a file are for ``nvme_swapped``, or for a rule's or ``strategy``'s choice that reads files too; with
    ``strategy: nvme_swapped``, tensors go by the default. For tensors, the first match decides: a copy within one
    side is ``pageable``; ``rules``, in order; ``strategy``, if it is not ``measured``; under 1 MiB at the
    destination, or an accelerator without streams, events or pinning is ``pageable``. Then ``measured`` takes the
    fastest, and the default ``pinned_direct`` for a source that is device-registered or that ``prepare`` may
    page-lock, and ``pinned_staged`` for everything else.

    Args:
        config: As for ``build_transfer``.
        accelerator: An accelerator, a registered name, or None for the configured one.

    Raises:
        ConfigError: The configuration, or the profile that it needs, has mistakes.
    """

    def __init__(self, config: ConfigLike | None = None, accelerator: Accelerator | str | None = None) -> None:
        self.config = resolve_config(config)
        self._choice = AcceleratorChoice(accelerator if accelerator is not None else self.config.accelerator)
        self._direct = cast(PinnedDirectConfig, self.config.section("pinned_direct"))
        self._profile = MachineProfile.load() if self.config.strategy == MEASURED else None
        self._profile_checked = self.config.strategy != MEASURED
        self._candidates = {name: self.config.section(name) for name in CANDIDATES}

    def select(self, destination: Tensor, source: Tensor | SwappedTensor) -> Decision:
        """The strategy for one copy. Takes about ten microseconds and does not block.

        Args:
            destination: Any tensor.
            source: A tensor of the same shape, or values in a file.

        Raises:
            AcceleratorFailedError: The accelerator is unknown or not available here.
        """
        if isinstance(source, SwappedTensor):
            return self._swapped(destination, source)
        decision = self._for_tensor(destination, source)
        if self.config.strategy != NVME_SWAPPED:
            return decision
        why = "`strategy: nvme_swapped` is for values in files, and this source is in memory."
        return Decision(decision.strategy, f"{why} {decision.reason}")

    def _for_tensor(self, destination: Tensor, source: Tensor) -> Decision:
        accelerator = self._choice.resolve()
        if not accelerator.on_device(destination):
            return Decision("pageable", f"The destination is not in the memory of {accelerator.name}.")
        if not accelerator.on_host(source):
            return Decision("pageable", "The source is on the device, so this is a plain device copy.")
        pinned = accelerator.is_pinned(source)
        for index, rule in enumerate(self.config.rules):
            if rule.use != NVME_SWAPPED and rule.when.holds(destination, source, pinned):
                return Decision(rule.use, f"rules[{index}] matches ({rule.when}).")
        if self.config.strategy not in (None, MEASURED, NVME_SWAPPED):
            return Decision(str(self.config.strategy), f"The configuration says `strategy: {self.config.strategy}`.")
        size = destination.numel() * destination.element_size()
        if size < SMALL_BYTES:
            return Decision(
                "pageable", f"{size} bytes are too few for staging to pay off ({SMALL_BYTES} would be enough)."
            )
        obstacle = accelerator.capabilities.why_not("streams", "events", "pins_host_memory")
        if obstacle is not None:
            return Decision("pageable", obstacle)
        profile = self._profile_of(accelerator)
        measured = self._measured(profile, accelerator, destination, source, pinned) if profile is not None else None
        return measured or self._default(accelerator, source, pinned)

    def _swapped(self, destination: Tensor, source: SwappedTensor) -> Decision:
        """For values in a file: a strategy that was asked for and reads files, or ``nvme_swapped``."""
        for index, rule in enumerate(self.config.rules):
            if get_strategy(rule.use).reads_swapped and rule.when.holds(destination, source, False):
                return Decision(rule.use, f"rules[{index}] matches ({rule.when}).")
        asked = self.config.strategy
        if asked not in (None, MEASURED) and get_strategy(asked).reads_swapped:
            return Decision(asked, f"The configuration says `strategy: {asked}`.")
        return Decision(NVME_SWAPPED, "The values are in a file, and are copied on while it is read.")

    def preparing(self, source: Tensor | SwappedTensor) -> tuple[str, ...]:
        """The strategies to which ``prepare`` should hand a source that will be copied from many times.

        Raises:
            AcceleratorFailedError: The accelerator is unknown or not available here.
        """
        accelerator = self._choice.resolve()
        if isinstance(source, SwappedTensor) or not accelerator.on_host(source):
            return ()
        chosen = {rule.use for rule in self.config.rules}
        if self.config.strategy not in (None, MEASURED, NVME_SWAPPED):
            return tuple(sorted(chosen | {str(self.config.strategy)}))
        if (
            source.numel() * source.element_size() >= SMALL_BYTES
            and self._why_not_page_lock(accelerator, source) is None
        ):
            chosen.add("pinned_direct")
        return tuple(sorted(chosen))

    def _measured(
        self, profile: MachineProfile, accelerator: Accelerator, destination: Tensor, source: Tensor, pinned: bool
    ) -> Decision | None:
        candidates = self._candidates
        if not source.is_contiguous() or not (pinned or self._why_not_page_lock(accelerator, source) is None):
            candidates = {name: config for name, config in candidates.items() if name != "pinned_direct"}
        waits = self.config.completion != "deferred" or HOST_WAITS.get()
        choice = fastest(profile, candidates, source.numel(), source.dtype, destination.dtype, waits=waits)
        return None if choice is None else Decision(*choice)

    def _profile_of(self, accelerator: Accelerator) -> MachineProfile | None:
        """The profile if it is this machine's; says once if it is not."""
        if not self._profile_checked:
            self._profile_checked = True
            reason = "There is no profile of this machine yet; `h2d tune` measures it in a minute."
            if self._profile is not None:
                reason = self._profile.mismatch(accelerator) or ""
            if reason:
                self._profile = None
                warn_caller(f"`strategy: measured` falls back to the default policy. {reason}", MachineProfileWarning)
        return self._profile

    def _default(self, accelerator: Accelerator, source: Tensor, pinned: bool) -> Decision:
        if not source.is_contiguous():
            return Decision("pinned_staged", "The source is not contiguous, so it is cast into staging buffers.")
        if pinned:
            return Decision(
                "pinned_direct", "The source is device-registered, so the device reads and casts it itself."
            )
        obstacle = self._why_not_page_lock(accelerator, source)
        if obstacle is not None:
            return Decision("pinned_staged", f"The source is cast into pinned staging buffers. {obstacle}")
        return Decision(
            "pinned_direct", "The source may be page-locked in place: `prepare` does it, and until then it is staged."
        )

    def _why_not_page_lock(self, accelerator: Accelerator, source: Tensor) -> str | None:
        """Why ``prepare`` would not page-lock this source, as one sentence, or None."""
        if not self._direct.page_lock:
            return "`pinned_direct.page_lock` is false."
        if not self.config.fallback:
            # Nobody knows whether it was prepared, and not to have been would be an error.
            return "With `fallback: false`, `strategy: pinned_direct` asks for page-locking in place."
        num_bytes = source.untyped_storage().nbytes()
        if self._budget is not None and num_bytes > self._budget:
            return f"Its {num_bytes} bytes are more than `pinned_direct.max_page_locked` ({self._budget})."
        return accelerator.capabilities.why_not("registers_host_memory")

    @functools.cached_property
    def _budget(self) -> int | None:
        return self._direct.page_lock_budget_bytes()
