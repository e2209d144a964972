"""Errors and warnings of ``transfer``.

::

    TransferError
    ├── InvalidTensorError          (ValueError)   tensors that cannot be copied as given
    │   └── InferenceTensorError    (RuntimeError) the destination is an inference tensor
    ├── UnsupportedDtypeError       (TypeError)    a pair of dtypes without a faithful copy
    ├── NotATensorError             (TypeError)    an argument that is not a tensor
    ├── StrategyUnavailableError    (RuntimeError) a copy that the strategy cannot make, or a resource it is refused
    ├── TransferBusyError           (RuntimeError) a submit in the middle of another one of the same thread
    ├── GraphCaptureError           (RuntimeError) a submit while the device records a graph
    ├── AcceleratorFailedError      (RuntimeError) an error of ``accelerators``, chained
    ├── ForkedProcessError          (RuntimeError) a transfer of the parent process used in a child
    ├── VerificationError           (RuntimeError) a copy that has left wrong values, found by ``verify``
    ├── AttachError                 (TypeError)    an engine that ``transfer.zero3`` cannot serve
    ├── StrategyRegistrationError   (ValueError)   a name or class that cannot be registered
    ├── SwapError                   (OSError)      a swap file that cannot be written or read, with its path
    │   ├── SwapFileNotFoundError   (FileNotFoundError)
    │   ├── SwapPermissionError     (PermissionError)
    │   ├── SwapNotADirectoryError  (NotADirectoryError)
    │   ├── SwapSpaceError                         no room for what is to be written
    │   └── SwapCorruptedError      (ValueError)   a file that does not hold what was swapped out
    └── ConfigError                 (ValueError)   a configuration with mistakes, all of them listed
        ├── ConfigFileError         (OSError)      a file that cannot be read
        │   └── ConfigFileNotFoundError (FileNotFoundError)
        └── UnknownStrategyError    (LookupError)  no strategy of this name is registered

    TransferWarning                 (UserWarning)
    ├── FallbackWarning             copies fall back to a slower strategy; once for each strategy
    ├── MachineProfileWarning       `strategy: measured` without a profile of this machine; once
    └── PinnedMemoryWarning         more memory is pinned than the configuration says

Each also derives from the builtin that a caller would catch. Errors of a vendor's own code reach
the caller as they are.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

#: What the system says where there is no room: on the drive, in the quota, below the limit of the process.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TransferError(Exception):
    """Base of everything that ``transfer`` raises on its own account."""


class InvalidTensorError(TransferError, ValueError):
    """The tensors cannot be copied as given; nothing was written."""


class InferenceTensorError(InvalidTensorError, RuntimeError):
    """The destination was made in inference mode and is written outside it; nothing was written."""


class UnsupportedDtypeError(TransferError, TypeError):
    """No faithful copy exists between these dtypes; nothing was written."""


class NotATensorError(TransferError, TypeError):
    """The destination or source is not a tensor; nothing was written."""


class StrategyUnavailableError(TransferError, RuntimeError):
    """The strategy cannot make this copy, or the system refuses what it needs; nothing was written.

    What ``build_transfer`` returns raises it where no other strategy can, and with ``fallback: false``.
    """


class TransferBusyError(TransferError, RuntimeError):
    """A signal handler or a finalizer submits in the middle of a submit or close of its own thread.

    The buffers are in use, so nothing of the inner copy has begun; the outer one is not touched.
    """


class GraphCaptureError(TransferError, RuntimeError):
    """The current stream records a graph, in which a copy cannot be waited for; nothing was queued or asked."""


class AcceleratorFailedError(TransferError, RuntimeError):
    """``accelerators`` raised an error, which is the ``__cause__``; chunks in flight were waited for."""


class ForkedProcessError(TransferError, RuntimeError):
    """A transfer made before a fork was used in the child; the parent's memory was not touched."""


@dataclass(eq=False)
class VerificationError(TransferError, RuntimeError):
    """``verify`` has found that a copy left other values than the host's own cast of its source.

    The copy has ended, and nothing else was written. The destination keeps the wrong values, the source was only read.
    Under ZeRO-3, every copy of the step was waited for, the masters are updated, and nothing was gathered.

    Attributes:
        destination: Its dtype, shape and device.
        first: Index of the first wrong element, in logical order; under ZeRO-3, in the sub-group's partition.
        last: Index of the last one that was found.
        wrong: How many were found.
        compared: How many elements were compared.
        expected: What the first must be: its value and its bits.
        found: What it is.
        mode: ``sample`` or ``full``.
        seed: Of the transfer. With ``copy``, the number of the copy, it says which elements were compared.
        sub_group: Of ZeRO-3, or None.
    """

    destination: str
    first: int
    last: int
    wrong: int
    compared: int
    expected: str
    found: str
    mode: str
    seed: int
    copy: int
    sub_group: int | None = None

    def __str__(self) -> str:
        of = "" if self.sub_group is None else f" of sub-group {self.sub_group}"
        return (
            f"a copy{of} to {self.destination} left wrong values: element {self.first} is {self.found} and must be "
            f"{self.expected}. {self.wrong} of {self.compared} compared elements are wrong, from {self.first} to "
            f"{self.last}. The destination keeps them; the source was only read (verify: {self.mode}, seed "
            f"{self.seed}, copy {self.copy})"
        )

    def __reduce__(self) -> tuple[type[VerificationError], tuple[object, ...]]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    def in_sub_group(self, sub_group: int, offset: int) -> VerificationError:
        """The same, of a copy to the part of a sub-group's partition that begins at element ``offset``."""
        return replace(self, first=self.first + offset, last=self.last + offset, sub_group=sub_group)


class AttachError(TransferError, TypeError):
    """The engine has no ZeRO-3 copy-back that could be served; it is unchanged."""


class StrategyRegistrationError(TransferError, ValueError):
    """A registration was refused; the registry is unchanged."""


class SwapError(TransferError, OSError):
    """Values cannot be written to a file or read from it; ``filename`` is its path, ``errno`` the cause.

    After a failed write there is no file. After a failed read, each element of the destination is its old or its own
    new value.
    """


class SwapFileNotFoundError(SwapError, FileNotFoundError):
    """The file, or a directory above it, is not there."""


class SwapPermissionError(SwapError, PermissionError):
    """This user may not read or write there."""


class SwapNotADirectoryError(SwapError, NotADirectoryError):
    """The path exists but is not a directory."""


class SwapSpaceError(SwapError):
    """The drive, the quota or the process's limit has no room for the values; nothing was written."""


class SwapCorruptedError(SwapError, ValueError):
    """The file is too short, was replaced, or its bytes have changed. Chunks before the wrong one may be copied."""


def swap_error(error: OSError | ValueError, what: str, path: object) -> SwapError:
    """The error of ours for one of the system's, with what failed and where.

    Args:
        error: What the system raised.
        what: What could not be done, as the beginning of a sentence.
        path: Of the file or directory.
    """
    if isinstance(error, SwapError):
        return error
    kinds = (SwapFileNotFoundError, SwapPermissionError, SwapNotADirectoryError)
    number = getattr(error, "errno", None) or errno.EINVAL
    other = SwapSpaceError if number in NO_ROOM else SwapError
    kind = next((each for each in kinds if isinstance(error, each.__bases__[1])), other)
    return kind(number, f"{what}: {getattr(error, 'strerror', None) or os.strerror(number)}", str(path))


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration.

    Attributes:
        key: Dotted path of the value, such as ``transfer.pinned_staged.chunk_elements``.
        message: What was found and what is allowed.
        file: Its file, or None for a mapping.
        line: Its line there, counted from 1, or None.
    """

    key: str
    message: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = "" if self.file is None else f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        return f"{place}{self.key}: {self.message}" if self.key else f"{place}{self.message}"


class ConfigError(TransferError, ValueError):
    """A configuration has mistakes; nothing was changed by trying it.

    Attributes:
        problems: Every mistake found.
    """

    def __init__(self, problems: Sequence[ConfigProblem] | str) -> None:
        if isinstance(problems, str):
            problems = [ConfigProblem("", problems)]
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[ConfigProblem, ...]]]:
        return type(self), (self.problems,)


class ConfigFileError(ConfigError, OSError):
    """The configuration file cannot be read; the ``OSError`` is the ``__cause__``."""


class ConfigFileNotFoundError(ConfigFileError, FileNotFoundError):
    """The configuration file does not exist."""


class UnknownStrategyError(ConfigError, LookupError):
    """No strategy is registered under the name asked for; the nearest one is given."""


class TransferWarning(UserWarning):
    """Base of every warning of ``transfer``."""


class FallbackWarning(TransferWarning):
    """A strategy cannot make a copy, and a slower one makes it. Warned once for each strategy of a transfer."""


class MachineProfileWarning(TransferWarning):
    """``strategy: measured`` has no profile of this machine, and the default policy applies."""


class PinnedMemoryWarning(TransferWarning):
    """The accelerator rounds pinned memory up, so that a staging buffer takes much more than it holds."""


def run_all(actions: Iterable[Callable[[], object]]) -> None:
    """Runs every action, also after an error; then raises the first error, Ctrl-C among them."""
    first: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:  # noqa: BLE001, PERF203 - it is raised below
            first = first or error
    if first is not None:
        raise first


_OURS = ("transfer", "contextlib")


def warn_caller(message: str, category: type[TransferWarning]) -> None:
    """``warnings.warn`` at the innermost frame outside this package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
