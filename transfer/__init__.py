"""Moves training state from host memory into an accelerator's memory, fast and bitwise right.

::

    from transfer import build_transfer

    with build_transfer("transfer.yaml") as transfer:
        transfer.copy(destination, source)

======================  ==================================================================================
``build_transfer``      makes a transfer; ``load_config`` and ``TransferConfig`` are what it is made from
``HostToDeviceTransfer``  its interface: ``submit``, ``copy``, ``prepare``, ``stats``, ``close``
``InFlightCopy``        what ``submit`` returns
``TransferPolicy``      which strategy a copy takes, and why: a ``Decision``
``SwappedTensor``       values in a file, as a source; ``transfer.nvme`` writes them
``register_strategy``   adds a way to move bytes
``transfer.zero3``      all of it under DeepSpeed ZeRO-3
``transfer.errors``     every error and warning; all errors are a ``TransferError``
``transfer.testing``    the conformance suite for strategies
======================  ==================================================================================

``import transfer`` loads nothing else: not torch, not deepspeed. A name is loaded when it is asked for. ``dir`` and
``help`` show the face; every name in ``__all__`` is as public, and stays.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Rule, TransferConfig, When
    from .config_file import load_config
    from .errors import (
        AcceleratorFailedError,
        AttachError,
        ConfigError,
        ConfigFileError,
        ConfigFileNotFoundError,
        ConfigProblem,
        FallbackWarning,
        ForkedProcessError,
        GraphCaptureError,
        InferenceTensorError,
        InvalidTensorError,
        MachineProfileWarning,
        NotATensorError,
        PinnedMemoryWarning,
        StrategyRegistrationError,
        StrategyUnavailableError,
        SwapCorruptedError,
        SwapError,
        SwapFileNotFoundError,
        SwapNotADirectoryError,
        SwapPermissionError,
        SwapSpaceError,
        TransferBusyError,
        TransferError,
        TransferWarning,
        UnknownStrategyError,
        UnsupportedDtypeError,
        VerificationError,
    )
    from .in_flight import EventCopy, InFlightCopy
    from .interface import HostToDeviceTransfer
    from .measured.profile import MachineProfile
    from .memory.chunks import plan_chunks
    from .nvme import SwappedTensor
    from .policy import Decision, TransferPolicy
    from .registry import get_strategy, register_strategy, strategy_names, unregister_strategy
    from .routing import build_transfer
    from .schema.model import StrategyConfig
    from .stats import StrategyStats
    from .strategies import (
        NvmeSwappedConfig,
        NvmeSwappedTransfer,
        PageableTransfer,
        PinnedDirectConfig,
        PinnedDirectTransfer,
        PinnedStagedConfig,
        PinnedStagedTransfer,
    )

__all__ = [
    "AcceleratorFailedError",
    "AttachError",
    "ConfigError",
    "ConfigFileError",
    "ConfigFileNotFoundError",
    "ConfigProblem",
    "Decision",
    "EventCopy",
    "FallbackWarning",
    "ForkedProcessError",
    "GraphCaptureError",
    "HostToDeviceTransfer",
    "InFlightCopy",
    "InferenceTensorError",
    "InvalidTensorError",
    "MachineProfile",
    "MachineProfileWarning",
    "NotATensorError",
    "NvmeSwappedConfig",
    "NvmeSwappedTransfer",
    "PageableTransfer",
    "PinnedDirectConfig",
    "PinnedDirectTransfer",
    "PinnedMemoryWarning",
    "PinnedStagedConfig",
    "PinnedStagedTransfer",
    "Rule",
    "StrategyConfig",
    "StrategyRegistrationError",
    "StrategyStats",
    "StrategyUnavailableError",
    "SwapCorruptedError",
    "SwapError",
    "SwapFileNotFoundError",
    "SwapNotADirectoryError",
    "SwapPermissionError",
    "SwapSpaceError",
    "SwappedTensor",
    "TransferBusyError",
    "TransferConfig",
    "TransferError",
    "TransferPolicy",
    "TransferWarning",
    "UnknownStrategyError",
    "UnsupportedDtypeError",
    "VerificationError",
    "When",
    "build_transfer",
    "get_strategy",
    "load_config",
    "plan_chunks",
    "register_strategy",
    "strategy_names",
    "unregister_strategy",
]

#: What `dir` and `help` show: what most programs need.
_FACE = [
    "ConfigError",
    "Decision",
    "HostToDeviceTransfer",
    "InFlightCopy",
    "StrategyStats",
    "SwappedTensor",
    "TransferConfig",
    "TransferError",
    "TransferPolicy",
    "build_transfer",
    "load_config",
    "register_strategy",
]

#: Where each public name is defined.
_HOMES = {
    "config": "Rule TransferConfig When",
    "config_file": "load_config",
    "errors": (
        "AcceleratorFailedError AttachError ConfigError ConfigFileError ConfigFileNotFoundError ConfigProblem "
        "FallbackWarning ForkedProcessError GraphCaptureError InferenceTensorError InvalidTensorError "
        "MachineProfileWarning NotATensorError PinnedMemoryWarning StrategyRegistrationError "
        "StrategyUnavailableError SwapCorruptedError SwapError SwapFileNotFoundError SwapNotADirectoryError "
        "SwapPermissionError SwapSpaceError TransferBusyError TransferError TransferWarning "
        "UnknownStrategyError UnsupportedDtypeError VerificationError"
    ),
    "in_flight": "EventCopy InFlightCopy",
    "interface": "HostToDeviceTransfer",
    "measured.profile": "MachineProfile",
    "memory.chunks": "plan_chunks",
    "nvme": "SwappedTensor",
    "policy": "Decision TransferPolicy",
    "registry": "get_strategy register_strategy strategy_names unregister_strategy",
    "routing": "build_transfer",
    "schema.model": "StrategyConfig",
    "stats": "StrategyStats",
    "strategies": (
        "NvmeSwappedConfig NvmeSwappedTransfer PageableTransfer PinnedDirectConfig PinnedDirectTransfer "
        "PinnedStagedConfig PinnedStagedTransfer"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
#: Parts of the package that are reached through it.
_PARTS = ("errors", "nvme", "testing", "zero3")


def __getattr__(name: str) -> Any:
    """A public name, loaded when it is first asked for; ``__version__``, which ``pyproject.toml`` alone says."""
    if name in _PARTS:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("host-to-device-transfer")
    except PackageNotFoundError as error:
        raise AttributeError("host-to-device-transfer is not installed, so its version is not known") from error


def __dir__() -> list[str]:
    return sorted({*_FACE, *_PARTS, "__version__"})
