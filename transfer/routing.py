"""One transfer that routes every copy through a policy: what users and ZeRO-3 hold."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from torch import Tensor

from accelerators import Accelerator

from .config_file import ConfigLike, resolve_config
from .in_flight import InFlightCopy
from .interface import HostToDeviceTransfer
from .policy import Decision, TransferPolicy
from .registry import get_strategy
from .stats import StrategyStats, merged
from .strategies.buffered import ExclusiveTransfer

logger = logging.getLogger("transfer")

#: Different decisions that one transfer logs; sizes make many that differ in nothing else.
MOST_LOGGED = 32


class RoutedTransfer(HostToDeviceTransfer):
    """Sends each copy to the strategy that its policy selects; strategies are made when first used.

    Each different decision is logged once, at level INFO, under the logger ``transfer``.

    Args:
        policy: Selects strategies, and holds the configuration of each.
        accelerator: As for ``build_transfer``.
    """

    reads_swapped = True

    def __init__(self, policy: TransferPolicy, accelerator: Accelerator | str | None = None) -> None:
        super().__init__(None, accelerator, fallback=policy.config.fallback)
        self.policy = policy
        self.config = policy.config
        self._strategies: dict[str, HostToDeviceTransfer] = {}
        self._lock = threading.RLock()
        self._logged: set[Decision] = set()

    @property
    def pinned_bytes(self) -> int:
        return sum(strategy.pinned_bytes for strategy in tuple(self._strategies.values()))

    @property
    def page_locked_bytes(self) -> int:
        return sum(strategy.page_locked_bytes for strategy in tuple(self._strategies.values()))

    @property
    def scratch_bytes(self) -> int:
        return sum(strategy.scratch_bytes for strategy in tuple(self._strategies.values()))

    def stats(self) -> dict[str, StrategyStats]:
        return merged(*(strategy.stats() for strategy in tuple(self._strategies.values())))

    def prepare(self, source: Tensor) -> None:
        for name in self.policy.preparing(source):
            self._strategy(name).prepare(source)

    def unprepare(self, source: Tensor) -> None:
        for strategy in tuple(self._strategies.values()):
            strategy.unprepare(source)

    def close(self) -> None:
        if self._is_forked:
            return
        with contextlib.ExitStack() as closing:  # closes every one of them, and raises an error after
            for strategy in tuple(self._strategies.values()):
                closing.callback(strategy.close)

    def _run(self, destination: Tensor, source: Any) -> InFlightCopy:
        return self._submit(destination, source)  # the strategy counts

    def _submit(self, destination: Tensor, source: Any) -> InFlightCopy:
        decision = self.policy.select(destination, source)
        if decision not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(decision)
            logger.info("%s: %s", decision.strategy, decision.reason)
        strategy = self._strategy(decision.strategy)
        strategy._check_process()
        return strategy._run(destination, source)

    def _strategy(self, name: str) -> HostToDeviceTransfer:
        strategy = self._strategies.get(name)
        if strategy is None:
            with self._lock:
                if name not in self._strategies:
                    config = self.policy.config.section(name)
                    made = get_strategy(name)(config, self._choice.given, fallback=self.fallback)
                    if isinstance(made, ExclusiveTransfer):
                        made.share_stand_in(self._strategy)
                    self._strategies[name] = made
                strategy = self._strategies[name]
        return strategy


def build_transfer(
    config: ConfigLike | None = None, accelerator: Accelerator | str | None = None
) -> HostToDeviceTransfer:
    """Builds the transfer that a configuration describes. Calls no accelerator: the first copy does.

    Args:
        config: A ``TransferConfig``; a mapping with the content of the YAML file's ``transfer``
            section; the path of such a file; or None for the file in ``$H2D_CONFIG`` if that is
            set, else the defaults.
        accelerator: An ``Accelerator`` or a registered name; None: the configured one, or else what
            ``accelerators.get_accelerator()`` returns.

    Raises:
        ConfigError: The configuration has mistakes, which are listed with their place.
    """
    resolved = resolve_config(config)
    accelerator = accelerator if accelerator is not None else resolved.accelerator
    return RoutedTransfer(TransferPolicy(resolved, accelerator), accelerator)
