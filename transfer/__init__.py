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

``import transfer`` loads nothing else: not torch, not deepspeed. A name is loaded when it is asked for. The names in
``__all__`` are the face; other names that can be imported from here are as public, and stay.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Rule as Rule
    from .config import TransferConfig as TransferConfig
    from .config import When as When
    from .config_file import load_config as load_config
    from .errors import AcceleratorFailedError as AcceleratorFailedError
    from .errors import AttachError as AttachError
    from .errors import ConfigError as ConfigError
    from .errors import ConfigFileError as ConfigFileError
    from .errors import ConfigFileNotFoundError as ConfigFileNotFoundError
    from .errors import ConfigProblem as ConfigProblem
    from .errors import FallbackWarning as FallbackWarning
    from .errors import ForkedProcessError as ForkedProcessError
    from .errors import GraphCaptureError as GraphCaptureError
    from .errors import InferenceTensorError as InferenceTensorError
    from .errors import InvalidTensorError as InvalidTensorError
    from .errors import MachineProfileWarning as MachineProfileWarning
    from .errors import NotATensorError as NotATensorError
    from .errors import PinnedMemoryWarning as PinnedMemoryWarning
    from .errors import StrategyRegistrationError as StrategyRegistrationError
    from .errors import StrategyUnavailableError as StrategyUnavailableError
    from .errors import SwapCorruptedError as SwapCorruptedError
    from .errors import SwapError as SwapError
    from .errors import SwapFileNotFoundError as SwapFileNotFoundError
    from .errors import SwapNotADirectoryError as SwapNotADirectoryError
    from .errors import SwapPermissionError as SwapPermissionError
    from .errors import SwapSpaceError as SwapSpaceError
    from .errors import TransferBusyError as TransferBusyError
    from .errors import TransferError as TransferError
    from .errors import TransferWarning as TransferWarning
    from .errors import UnknownStrategyError as UnknownStrategyError
    from .errors import UnsupportedDtypeError as UnsupportedDtypeError
    from .errors import VerificationError as VerificationError
    from .in_flight import EventCopy as EventCopy
    from .in_flight import InFlightCopy as InFlightCopy
    from .interface import HostToDeviceTransfer as HostToDeviceTransfer
    from .measured.profile import MachineProfile as MachineProfile
    from .memory.chunks import plan_chunks as plan_chunks
    from .nvme import SwappedTensor as SwappedTensor
    from .policy import Decision as Decision
    from .policy import TransferPolicy as TransferPolicy
    from .registry import get_strategy as get_strategy
    from .registry import register_strategy as register_strategy
    from .registry import strategy_names as strategy_names
    from .registry import unregister_strategy as unregister_strategy
    from .routing import build_transfer as build_transfer
    from .schema.model import StrategyConfig as StrategyConfig
    from .stats import StrategyStats as StrategyStats
    from .strategies import NvmeSwappedConfig as NvmeSwappedConfig
    from .strategies import NvmeSwappedTransfer as NvmeSwappedTransfer
    from .strategies import PageableTransfer as PageableTransfer
    from .strategies import PinnedDirectConfig as PinnedDirectConfig
    from .strategies import PinnedDirectTransfer as PinnedDirectTransfer
    from .strategies import PinnedStagedConfig as PinnedStagedConfig
    from .strategies import PinnedStagedTransfer as PinnedStagedTransfer

__all__ = [
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
    return sorted({*__all__, *_PARTS, "__version__"})
