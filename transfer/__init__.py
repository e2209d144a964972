"""Moves training state from host memory into an accelerator's memory, fast and bitwise right.

::

    from transfer import build_transfer

    with build_transfer("transfer.yaml") as transfer:
        transfer.copy(destination, source)

``HostToDeviceTransfer`` is the interface, ``transfer/strategies/`` holds every way bytes move,
``TransferPolicy`` picks one, and ``transfer.zero3`` puts all of it under DeepSpeed ZeRO-3. Importing
this package starts no device and does not import deepspeed.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> str:
    """``__version__``, read when it is asked for: ``pyproject.toml`` alone says it."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("host-to-device-transfer")
    except PackageNotFoundError as error:
        raise AttributeError("host-to-device-transfer is not installed, so its version is not known") from error
