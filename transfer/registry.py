"""Strategies by name: ``register_strategy`` and the entry-point group ``transfer.strategies``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from accelerators.plugin_registry import Registry

from .errors import StrategyRegistrationError, UnknownStrategyError

if TYPE_CHECKING:
    from .interface import HostToDeviceTransfer

#: Used in place of a strategy's name: for each copy, the strategy that a profile of the machine says is fastest.
MEASURED = "measured"
#: Names that no strategy may have: ``measured``, and the keys of ``TransferConfig`` beside the strategies' sections.
RESERVED = frozenset({"accelerator", "strategy", "completion", "fallback", "rules", MEASURED})

#: This package's own, which are imported when they are asked for: a strategy more is a file and a line here.
_OWN = {
    "nvme_swapped": "transfer.strategies.nvme_swapped:NvmeSwappedTransfer",
    "pageable": "transfer.strategies.pageable:PageableTransfer",
    "pinned_direct": "transfer.strategies.pinned_direct:PinnedDirectTransfer",
    "pinned_staged": "transfer.strategies.pinned_staged:PinnedStagedTransfer",
}

_registry: Registry[Any] = Registry(
    "strategy", "transfer.strategies", StrategyRegistrationError, UnknownStrategyError, own=_OWN
)


def register_strategy(name: str, strategy: type[HostToDeviceTransfer]) -> None:
    """Registers a strategy under the name that policies and YAML files use.

    Its section of the YAML file has the same name, and its ``Config`` says what may stand there.

    Args:
        name: A lower-case identifier that is no strategy and no key of ``TransferConfig`` yet.
        strategy: A concrete subclass of ``HostToDeviceTransfer``, called as
            ``strategy(config, accelerator, fallback=...)``.

    Raises:
        StrategyRegistrationError: The name is taken or unusable, or ``strategy`` is not such a
            class. Nothing is registered then.
    """
    if name in RESERVED:
        raise StrategyRegistrationError(
            f"strategy name {name!r} cannot be registered: it has a meaning of its own in the configuration"
        )
    _check(name, strategy)
    _registry.add(name, strategy)


def unregister_strategy(name: str) -> None:
    """Undoes ``register_strategy``; does nothing for an unknown name."""
    _registry.remove(name)


def strategy_names() -> tuple[str, ...]:
    """Every registered name, sorted; loads no plug-in."""
    return _registry.names()


def get_strategy(name: str) -> type[HostToDeviceTransfer]:
    """The class registered under ``name``.

    Raises:
        UnknownStrategyError: No strategy has this name; the message gives the nearest one.
        StrategyRegistrationError: Two plug-ins claim it, one failed to load, or it is no strategy.
    """
    strategy: type[HostToDeviceTransfer] = _registry.get(name)
    _check(name, strategy)
    return strategy


def explain_unknown_strategy(name: object, *also: str) -> str:
    """The sentence for a name that is not registered, with the nearest one that is.

    Args:
        name: What was given.
        *also: Names that are allowed in that place beside those of strategies.
    """
    return _registry.explain_unknown(name, *also)


def _check(name: str, strategy: Any) -> None:
    from .interface import HostToDeviceTransfer

    if not (inspect.isclass(strategy) and issubclass(strategy, HostToDeviceTransfer)):
        raise StrategyRegistrationError(f"strategy {name!r}: {strategy!r} is not a subclass of HostToDeviceTransfer")
    missing = sorted(getattr(strategy, "__abstractmethods__", ()))
    if missing:
        raise StrategyRegistrationError(f"strategy {name!r}: {strategy.__name__} does not define {', '.join(missing)}")
