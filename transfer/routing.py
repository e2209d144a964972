"""The transfer that routes each copy through a policy: what users and ZeRO-3 hold. Only this module falls back."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from accelerators import Accelerator

from .config_file import ConfigLike
from .errors import ConfigError, FallbackWarning, StrategyUnavailableError, TransferError, run_all, warn_caller
from .in_flight import InFlightCopy
from .interface import HostToDeviceTransfer
from .policy import Decision, TransferPolicy
from .schema.model import StrategyConfig
from .stats import StrategyStats, merged
from .verification import Verifier

logger = logging.getLogger("transfer")

#: How many decisions one transfer logs: there are as many as there are sizes.
MOST_LOGGED = 32


class RoutedTransfer(HostToDeviceTransfer):
    """Sends each copy to the strategy that its policy selects.

    A copy falls back where the strategy that was asked for cannot make it, or the system refuses what a strategy needs.
    It then takes the same strategy with a simpler configuration, if there is one, else the policy's next. A
    ``FallbackWarning`` says so, once for each strategy. With ``fallback: false``, the copy raises
    ``StrategyUnavailableError`` instead. The next copy tries again.

    Each different decision is logged once, at level INFO, under the logger ``transfer``.

    Args:
        policy: Selects strategies, holds them, and knows the accelerator.
    """

    reads_swapped = True

    def __init__(self, policy: TransferPolicy) -> None:
        super().__init__(fallback=policy.config.fallback)
        self.policy = policy
        self.config = policy.config
        self._choice = policy.accelerator_choice
        self._simpler: dict[HostToDeviceTransfer, HostToDeviceTransfer] = {}
        self._logged: set[Decision] = set()
        self._warned: set[str] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + (", closed (a copy opens it again)>" if self._is_closed else ">")

    @property
    def pinned_bytes(self) -> int:
        return sum(strategy.pinned_bytes for strategy in self._strategies)

    @property
    def page_locked_bytes(self) -> int:
        return sum(strategy.page_locked_bytes for strategy in self._strategies)

    @property
    def scratch_bytes(self) -> int:
        return sum(strategy.scratch_bytes for strategy in self._strategies)

    def stats(self) -> dict[str, StrategyStats]:
        return merged(*(strategy.stats() for strategy in self._strategies))

    def prepare(self, source: Tensor) -> None:
        super().prepare(source)
        self._check_process()
        for name in self.policy.preparing(source):
            self._prepare(name, source)

    def would_page_lock(self, source: Tensor) -> bool:
        try:
            return any(self.policy.strategy(name).would_page_lock(source) for name in self.policy.preparing(source))
        except Exception:  # noqa: BLE001 - a vendor's `is_pinned` may raise; `prepare` says so
            return False

    def unprepare(self, source: Tensor) -> None:
        super().unprepare(source)
        if self._is_forked:
            return
        for strategy in self._strategies:
            strategy.unprepare(source)

    def close(self) -> None:
        if self._is_forked:
            return
        run_all([strategy.close for strategy in self._strategies])
        self._is_closed = True

    def _prepare(self, name: str, source: Tensor) -> None:
        try:
            self.policy.strategy(name).prepare(source)
        except StrategyUnavailableError as error:
            if not self.fallback:
                raise
            self._warn(name, f"{error} Copies from there take a slower strategy")
        except TransferError:
            raise
        except Exception as error:  # of a vendor: its methods may raise whatever they want
            if not self.fallback:
                raise
            self._warn(name, f"`{name}` cannot prepare a source ({type(error).__name__}: {error}). Copies are staged")

    @property
    def _strategies(self) -> tuple[HostToDeviceTransfer, ...]:
        return (*self.policy.strategies, *tuple(self._simpler.values()))

    def _run(self, accelerator: Accelerator, destination: Tensor, source: Any, waits: bool) -> InFlightCopy:
        self._is_closed = False
        decision = self.policy.choose(accelerator, destination, source, waits=waits)
        strategy = self.policy.strategy(decision.strategy)
        self._say(decision)
        if not self.fallback:
            return strategy._run(accelerator, destination, source, waits)
        try:
            return strategy._perform(accelerator, destination, source, waits)
        except StrategyUnavailableError as error:
            return self._fall_back(error, strategy, [decision.strategy], accelerator, destination, source, waits)

    def _submit(self, destination: Tensor, source: Any) -> InFlightCopy:
        return self._run(self.accelerator, destination, source, waits=False)

    def _fall_back(
        self,
        error: StrategyUnavailableError,
        strategy: HostToDeviceTransfer,
        refused: list[str],
        accelerator: Accelerator,
        destination: Tensor,
        source: Any,
        waits: bool,
    ) -> InFlightCopy:
        """Makes a copy after the system has refused what a strategy needs. Nothing is written yet."""
        reason: str | None = str(error)
        while True:
            if strategy.why_not(destination, source) is None:  # else it was overtaken, by an `unprepare` perhaps
                self._warn(refused[-1], f"{reason} The copy takes a slower way")
            simpler = self._simplified(strategy)
            if simpler is not None:
                strategy = simpler
            else:
                decision = self.policy.choose(accelerator, destination, source, waits=waits, without=refused)
                if decision.strategy in refused:
                    raise error
                strategy._counters.add(passed_on=1)
                refused.append(decision.strategy)
                strategy = self.policy.strategy(decision.strategy)
            try:
                return strategy._perform(accelerator, destination, source, waits)
            except StrategyUnavailableError as another:
                error, reason = another, str(another)

    def _simplified(self, strategy: HostToDeviceTransfer) -> HostToDeviceTransfer | None:
        """The same strategy with a configuration that needs less, or None."""
        config = strategy.config.simpler() if isinstance(strategy.config, StrategyConfig) else None
        if config is None:
            return None
        known = self._simpler.get(strategy)
        # Of two threads, the second's is dropped before it holds anything.
        return known or self._simpler.setdefault(strategy, type(strategy)(config, self._choice.given))

    def _say(self, decision: Decision) -> None:
        if decision not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(decision)
            logger.info("%s: %s", decision.strategy, decision.reason)
        if decision.instead_of is not None:
            if not decision.is_expected:
                self._warn(decision.instead_of, f"{decision.reason} The copy takes `{decision.strategy}`")
            self.policy.strategy(decision.instead_of)._counters.add(passed_on=1)

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn_caller(f"{message}, which is slower; `fallback: false` makes this an error.", FallbackWarning)


class VerifiedTransfer(RoutedTransfer):
    """As ``RoutedTransfer``, with ``verify: sample`` or ``verify: full``: each copy is compared when it is waited for.

    What a copy must leave is worked out by the host before ``submit`` returns, so that the source may change as the
    strategy allows. ``sample`` also queues the reading of the sample there. Where the first ``wait`` of a copy, or the
    first ``done`` that sees it finished, finds wrong values, it raises ``VerificationError``. A copy that only
    ``order_after`` is asked of is not compared with ``sample``; with ``full``, ``order_after`` waits. Copies within the
    device, and those of strategies used alone, are not compared.
    """

    def __init__(self, policy: TransferPolicy) -> None:
        super().__init__(policy)
        self.verifier = Verifier(policy.config.verify)

    @property
    def pinned_bytes(self) -> int:
        return super().pinned_bytes + self.verifier.pinned_bytes

    def close(self) -> None:
        if not self._is_forked:
            run_all([super().close, self.verifier.close])

    def _run(self, accelerator: Accelerator, destination: Tensor, source: Any, waits: bool) -> InFlightCopy:
        copy = super()._run(accelerator, destination, source, waits)
        return self.verifier.watch(accelerator, copy, destination, source)


def build_transfer(
    config: ConfigLike | None = None, accelerator: Accelerator | str | None = None, **options: Any
) -> HostToDeviceTransfer:
    """Builds the transfer that a configuration describes. Calls no accelerator: the first copy does.

    Args:
        config: A ``TransferConfig``; a mapping with the content of the YAML file's ``transfer``
            section; the path of such a file; or None for the file in ``$H2D_CONFIG`` if that is
            set, else the defaults.
        accelerator: An ``Accelerator`` or a registered name; None: the configured one, or else what
            ``accelerators.get_accelerator()`` returns.
        **options: Keys of the ``transfer`` section, in place of ``config``: ``build_transfer(strategy="pinned_staged",
            pinned_staged={"buffers": 3})``.

    Raises:
        ConfigError: The configuration has mistakes, which are listed with their place.
    """
    if options and config is not None:
        raise ConfigError(f"give either config or the options {', '.join(options)}, not both")
    policy = TransferPolicy(options or config, accelerator)
    # Another class, so that a copy that is not compared costs nothing more.
    return RoutedTransfer(policy) if policy.config.verify == "off" else VerifiedTransfer(policy)
