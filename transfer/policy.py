"""Which strategy a copy takes, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerators import Accelerator

from .accelerator_choice import AcceleratorChoice, accelerator_errors
from .config_file import ConfigLike, resolve_config
from .errors import MachineProfileWarning, TransferError, warn_caller
from .interface import HostToDeviceTransfer
from .measured import CANDIDATES, MachineProfile, fastest
from .nvme import SwappedTensor
from .registry import MEASURED, get_strategy
from .stats import format_bytes
from .strategies.pinned_direct import UNPREPARED
from .tensor_memory import check_memory

#: The strategy that reads files; a rule or ``strategy`` that names it is passed over for tensors.
NVME_SWAPPED = "nvme_swapped"
#: How a reason begins where a vendor's method raises, and another strategy goes on without its answer.
_UNANSWERED = "The accelerator does not tell"
#: Below this many bytes at the destination, the fixed cost of staging outweighs what it gains.
SMALL_BYTES = 2**20
#: The same for a source that is page-locked, where nothing is staged. On an H200, from fp32 to bf16, `pinned_direct`
#: took 139 us from ``submit`` to the values for 256 KiB, and `pageable` 128; for 512 KiB it was 142 against 168.
SMALL_PAGE_LOCKED_BYTES = 2**19
#: Every dtype that a floating-point source may be cast to.
_FLOATING = tuple(
    dict.fromkeys(each for each in vars(torch).values() if isinstance(each, torch.dtype) and each.is_floating_point)
)


@dataclass(frozen=True)
class Decision:
    """What a policy picked.

    Attributes:
        strategy: A registered name.
        reason: One sentence a user can act on.
        instead_of: The strategy that a rule or ``strategy`` names, where it cannot make this copy; else None.
        is_expected: Whether the only reason is that the source is not prepared, which is worth no warning.
    """

    strategy: str
    reason: str
    instead_of: str | None = None
    is_expected: bool = True

    def __str__(self) -> str:
        return f"{self.strategy}: {self.reason}"


class TransferPolicy:
    """Picks a strategy for each copy from what the tensors are at that moment.

    Keeps nothing about tensors seen before, pins nothing, copies nothing. It holds the strategies, which take no
    memory before their first copy. Making one calls no accelerator. With ``strategy: measured`` it reads the
    machine's profile when it is made; where there is none, or one of another machine, the first ``select`` warns
    once and the default applies.

    The first row that holds, and whose strategy has no reason not to (``why_not``):

    1. ``rules``, in order; then ``strategy``, unless it is ``measured``. Where such a strategy cannot make the copy,
       the rows below decide; with ``fallback: false`` the copy is an error.
    2. A copy within the host or within the device: ``pageable``. Values in a file: ``nvme_swapped``.
    3. Too small to gain from anything else, or an accelerator without streams, events or pinning: ``pageable``.
    4. ``measured``: the fastest by the profile.
    5. ``pinned_direct``, ``pinned_staged``, ``pageable``.

    Args:
        config: As for ``build_transfer``.
        accelerator: An accelerator, a registered name, or None for the configured one.

    Raises:
        ConfigError: The configuration, or the profile that it needs, has mistakes.
    """

    def __init__(self, config: ConfigLike | None = None, accelerator: Accelerator | str | None = None) -> None:
        self.config = resolve_config(config)
        #: Which accelerator the strategies copy to.
        self.accelerator_choice = AcceleratorChoice(accelerator if accelerator is not None else self.config.accelerator)
        asked = self.config.strategy
        self._asked = asked if asked != MEASURED else None  # the strategy that was asked for by name
        self._profile = MachineProfile.load() if asked == MEASURED else None
        self._profile_checked = asked != MEASURED
        self._strategies: dict[str, HostToDeviceTransfer] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"TransferPolicy({self.config!r}, accelerator={self.accelerator_choice.name!r})"

    @property
    def strategies(self) -> tuple[HostToDeviceTransfer, ...]:
        """Those that were made up to now."""
        return tuple(self._strategies.values())

    def strategy(self, name: str) -> HostToDeviceTransfer:
        """The strategy of this name, made with its section of the configuration when it is first needed."""
        found = self._strategies.get(name)
        if found is None:
            with self._lock:
                found = self._strategies.get(name)
                if found is None:
                    make, section = get_strategy(name), self.config.section(name)
                    found = make(section, self.accelerator_choice.given, fallback=self.config.fallback)
                    self._strategies[name] = found
        return found

    def select(self, destination: Tensor, source: Tensor | SwappedTensor) -> Decision:
        """The strategy that ``submit`` takes for a copy. Takes about ten microseconds and does not block.

        Args:
            destination: Any tensor.
            source: A tensor of the same shape, or values in a file.

        Raises:
            AcceleratorFailedError: The accelerator is unknown or not available here, or raises an error of its own.
            InvalidTensorError: A side has no memory of its own, as a DTensor.
        """
        check_memory(destination, "destination")
        check_memory(source, "source")
        with accelerator_errors():
            return self.choose(self.accelerator_choice.resolve(), destination, source, waits=False)

    def choose(
        self,
        accelerator: Accelerator,
        destination: Tensor,
        source: Tensor | SwappedTensor,
        *,
        waits: bool,
        without: Collection[str] = (),
    ) -> Decision:
        """As ``select``, for a resolved accelerator.

        Args:
            accelerator: The one that copies go to.
            destination: As for ``select``.
            source: As for ``select``.
            waits: Whether the caller waits at once, as ``copy`` does.
            without: Strategies that were just refused what they need.
        """
        if isinstance(source, Tensor):
            if not accelerator.on_device(destination):
                return Decision("pageable", f"The destination is not in the memory of {accelerator.name}.")
            if not accelerator.on_host(source):
                return Decision("pageable", "The source is on the device, so this is a plain device copy.")
        named = self._named(destination, source, accelerator.is_pinned)
        if named is None or named.strategy in without:
            decision = self._rows(accelerator, destination, source, waits, without)
            if self._asked != NVME_SWAPPED or not isinstance(source, Tensor):
                return decision
            why = "`strategy: nvme_swapped` is for values in files, and this source is in memory."
            return Decision(decision.strategy, f"{why} {decision.reason}")
        obstacle = self._obstacle(named.strategy, destination, source) if self.config.fallback else None
        if obstacle is None:
            return named
        instead = self._rows(accelerator, destination, source, waits, without)
        reason = f"`{named.strategy}` cannot make this copy. {obstacle}"
        return Decision(instead.strategy, reason, named.strategy, obstacle == UNPREPARED)

    def preparing(self, source: Tensor | SwappedTensor) -> tuple[str, ...]:
        """The strategies that are to prepare a source: those that ``select`` may take once it is prepared.

        Several, where rules ask for more than is known of the destinations.

        Raises:
            AcceleratorFailedError: The accelerator is unknown or not available here, or raises an error of its own.
        """
        accelerator = self.accelerator_choice.resolve()
        with accelerator_errors():
            if isinstance(source, SwappedTensor) or not accelerator.on_host(source):
                return ()
            gains = source.numel() * source.element_size() >= SMALL_PAGE_LOCKED_BYTES
            locks = accelerator.capabilities.why_not("registers_host_memory", "streams", "events") is None
        default = "pinned_direct" if gains and locks else None  # where no name is given, or one for files alone
        several = self.config.rules and source.dtype.is_floating_point
        chosen = set()
        for dtype in _FLOATING if several else (source.dtype,):
            destination = torch.empty(source.numel(), dtype=dtype, device="meta")
            named = self._named(destination, source, lambda _prepared: True)
            chosen.add(default if named is None else named.strategy)
        return tuple(sorted(name for name in chosen if name is not None))

    def _named(
        self, destination: Tensor, source: Tensor | SwappedTensor, is_pinned: Callable[[Tensor], bool]
    ) -> Decision | None:
        """The strategy of the first rule that holds, else of ``strategy``; None where neither takes such a source."""
        from_file = isinstance(source, SwappedTensor)

        def is_for(name: str) -> bool:
            return self.strategy(name).reads_swapped if from_file else name != NVME_SWAPPED

        for index, rule in enumerate(self.config.rules):
            if is_for(rule.use):
                # Asked only where a rule needs it: a vendor's `is_pinned` may raise.
                asks = rule.when.source_pinned is not None
                pinned = asks and isinstance(source, Tensor) and is_pinned(source)
                if rule.when.holds(destination, source, pinned):
                    return Decision(rule.use, f"rules[{index}] matches ({rule.when}).")
        if self._asked is not None and is_for(self._asked):
            return Decision(self._asked, f"The configuration says `strategy: {self._asked}`.")
        return None

    def _rows(
        self,
        accelerator: Accelerator,
        destination: Tensor,
        source: Tensor | SwappedTensor,
        waits: bool,
        without: Collection[str],
    ) -> Decision:
        """The rows below the configuration's own: 2 to 5 of the class."""
        if isinstance(source, SwappedTensor):
            return Decision(NVME_SWAPPED, "The values are in a file, and are copied on while it is read.")
        profile = self._profile_of(accelerator) if destination.nbytes >= SMALL_PAGE_LOCKED_BYTES else None
        measured = None if profile is None else self._measured(profile, destination, source, waits, without)
        if measured is not None:
            return measured
        reason = "The source is page-locked, so the device reads and casts it itself."
        unanswered = None
        for name in CANDIDATES:
            obstacle = self._why_not(name, accelerator, destination, source)
            if obstacle is not None and obstacle.startswith(_UNANSWERED):
                unanswered = name, obstacle
            if obstacle is None and name in without:
                obstacle = f"The system refuses what `{name}` needs."
            if obstacle is None:
                break
            reason = obstacle
        if unanswered is not None:
            return Decision(name, unanswered[1], unanswered[0], False)
        return Decision(name, reason)

    def _obstacle(self, name: str, destination: Tensor, source: Tensor | SwappedTensor) -> str | None:
        """``why_not`` of a strategy; a sentence too where a vendor's ``is_pinned`` or the like raises.

        With ``fallback: false`` the vendor's error is raised as it is.
        """
        try:
            return self.strategy(name).why_not(destination, source)
        except TransferError:
            raise
        except Exception as error:
            if not self.config.fallback:
                raise
            return f"{_UNANSWERED} what `{name}` has to know ({type(error).__name__}: {error})."

    def _why_not(self, name: str, accelerator: Accelerator, destination: Tensor, source: Tensor) -> str | None:
        """Why a row is passed over: it does not pay off, or its strategy cannot make the copy."""
        if name == "pageable":
            return None
        size = destination.nbytes
        if size < SMALL_PAGE_LOCKED_BYTES or (name == "pinned_staged" and size < SMALL_BYTES):
            return f"{format_bytes(size)} are too few to be staged ({format_bytes(SMALL_BYTES)} would be enough)."
        if name == "pinned_staged":  # it needs no streams, but without them it overlaps nothing
            missing = accelerator.capabilities.why_not("streams")
            if missing is not None:
                return missing
        return self._obstacle(name, destination, source)

    def _measured(
        self, profile: MachineProfile, destination: Tensor, source: Tensor, waits: bool, without: Collection[str]
    ) -> Decision | None:
        """The fastest of the strategies that can make the copy; None where the profile has no times of such copies."""
        able = [name for name in CANDIDATES if name not in without and not self._obstacle(name, destination, source)]
        choice = fastest(
            profile,
            {name: self.strategy(name).config for name in able},
            source.numel(),
            source.dtype,
            destination.dtype,
            waits=waits or self.config.completion != "deferred",
        )
        return None if choice is None else Decision(*choice)

    @property
    def profile(self) -> MachineProfile | None:
        """The machine's profile where ``strategy: measured`` goes by one; None otherwise. May start the accelerator."""
        return None if self._profile is None else self._profile_of(self.accelerator_choice.resolve())

    def _profile_of(self, accelerator: Accelerator) -> MachineProfile | None:
        """The profile, if it is of this machine; warns once if it is not."""
        if not self._profile_checked:
            self._profile_checked = True
            reason = "There is no profile of this machine yet; `h2d tune` measures it in a minute."
            if self._profile is not None:
                reason = self._profile.mismatch(accelerator) or ""
            if reason:
                self._profile = None
                warn_caller(f"`strategy: measured` falls back to the default policy. {reason}", MachineProfileWarning)
        return self._profile
