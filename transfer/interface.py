"""The interface: every way to bring values from host memory into an accelerator's memory.

To add one, subclass ``HostToDeviceTransfer``, write ``_submit``, and register the class
(``transfer.register_strategy``); ``transfer/strategies/pageable.py`` is the shortest example and
``transfer.testing.TransferConformance`` the check.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from accelerators import Accelerator, AcceleratorError, get_accelerator

from .errors import AcceleratorFailedError, ForkedProcessError
from .in_flight import FINISHED, InFlightCopy
from .strategy_config import StrategyConfig, strategy_config
from .validation import validate


class HostToDeviceTransfer(ABC):
    """Copies tensors from host memory to an accelerator, with the bits of ``destination.copy_(source)``.

    The contract of every strategy:

    1. The destination ends as ``destination.copy_(source)`` would leave it, bit for bit; a NaN
       stays a NaN, with any payload. What cannot be right is refused before anything is written.
    2. Nothing outside the destination is written.
    3. The source may be changed or freed once ``InFlightCopy.release_source`` has returned.
    4. Pinned bytes are fixed by the configuration, shown by ``pinned_bytes``, and zero after ``close``.
    5. After an error, nothing is in flight, each element of the destination is its old or its own
       new value, and the next transfer works. Errors that are not ours arrive as they are.
    6. The copy runs after the work that is queued on the caller's current stream of the
       destination's device. Other streams are the caller's business.

    Thread-safe: threads may share one object. After a fork, the child gets ``ForkedProcessError``.

    Args:
        config: An instance of ``Config``, a mapping with its fields, or None for its defaults.
        accelerator: An ``Accelerator``, a registered name, or None for what
            ``accelerators.get_accelerator()`` returns; nothing is called before the first transfer.
        fallback: Whether a slower strategy may stand in, with one ``FallbackWarning``, where this
            one cannot run. False: ``StrategyUnavailableError`` instead.
        **options: Fields of ``Config`` by name, in place of ``config``.

    Raises:
        ConfigError: A field is unknown or has a value that is not allowed.
    """

    #: The strategy's own configuration model.
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig

    # Defaults of the class, so that a subclass may leave out ``super().__init__``.
    config: Any = None
    fallback: bool = True
    _given: Accelerator | str | None = None
    _resolved: Accelerator | None = None
    _process: int | None = None

    def __init__(
        self,
        config: StrategyConfig | Mapping[str, Any] | None = None,
        accelerator: Accelerator | str | None = None,
        *,
        fallback: bool = True,
        **options: Any,
    ) -> None:
        self.config = strategy_config(self.Config, config, options)
        self.fallback = fallback
        self._given = accelerator

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator in use; one that was not named follows ``get_accelerator()``.

        Raises:
            AcceleratorFailedError: It is unknown, invalid, or not available here.
        """
        if self._resolved is not None and self._given is not None:
            return self._resolved
        try:
            current = self._given if self._given is not None else get_accelerator()
            current = get_accelerator(current) if isinstance(current, str) else current
        except AcceleratorError as error:
            raise AcceleratorFailedError(str(error)) from error
        if current is not self._resolved:
            reason = current.unavailable_reason()
            if reason is not None:
                raise AcceleratorFailedError(f"cannot transfer to {current.name}: {reason}")
            self.close()  # what is pinned belongs to the accelerator before
            self._resolved = current
        return current

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that this object holds pinned now."""
        return 0

    def submit(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        """Starts a copy.

        Args:
            destination: A floating-point tensor of any shape and strides on the device. Its
                ``requires_grad`` and graph stay as they are.
            source: A tensor of the same shape in host memory; another floating dtype is cast,
                rounding to nearest even. A source on the device is a plain device copy.

        Returns:
            The copy, which may still be running. Until it is waited for, the destination must not
            be read or freed.

        Raises:
            TransferError: The tensors or the accelerator are refused; see ``transfer.errors``.
            Exception: What the accelerator itself raises, as it is.
        """
        self._check_process()
        if not validate(destination, source):
            return FINISHED
        accelerator = self.accelerator
        with torch.no_grad():
            try:
                return self._submit(destination.detach(), source.detach())
            except BaseException as error:
                with contextlib.suppress(Exception):
                    accelerator.synchronize(destination.device.index)
                if isinstance(error, AcceleratorError):
                    raise AcceleratorFailedError(str(error)) from error
                raise

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """``submit``, then ``wait``: returns when the destination holds the values."""
        self.submit(destination, source).wait()

    def prepare(self, source: Tensor) -> None:
        """A hint: this storage will be copied from many times.

        A strategy may do costly work for it now, such as page-locking. By default nothing is done.
        """

    def is_host_to_device(self, destination: Tensor, source: Tensor) -> bool:
        """Whether a copy would cross from host memory to this transfer's accelerator."""
        accelerator = self.accelerator
        return accelerator.on_device(destination) and accelerator.on_host(source)

    def close(self) -> None:
        """Waits for what is in flight and gives back every pinned byte.

        Closing twice is fine. A closed object holds nothing; a later ``submit`` pins anew.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @abstractmethod
    def _submit(self, destination: Tensor, source: Tensor) -> InFlightCopy:
        """Starts a copy that ``submit`` has validated.

        Called under ``no_grad`` with detached tensors of equal shape and at least one element.
        When it raises, ``submit`` waits for the device before the error goes on to the caller.
        """

    @property
    def _is_forked(self) -> bool:
        return self._process is not None and self._process != os.getpid()

    def _check_process(self) -> None:
        if self._is_forked:
            raise ForkedProcessError(
                f"this {type(self).__name__} was first used in process {self._process} and cannot be used "
                f"in its fork {os.getpid()}; build a new one there"
            )
        self._process = os.getpid()
