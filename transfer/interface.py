"""The interface of every way to bring values from host memory into an accelerator's memory.

To add one, subclass ``HostToDeviceTransfer``, write ``_submit``, and register the class (``register_strategy``).
``transfer/strategies/pageable.py`` is the shortest example, ``transfer.testing.TransferConformance`` the check.

``submit`` and ``copy`` validate; then ``_run`` asks ``why_not``, ``_perform`` counts, and ``_submit`` copies.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from accelerators import Accelerator

from .accelerator_choice import AcceleratorChoice, check_capture, convert_errors_of, raising_ours
from .errors import ForkedProcessError, NotATensorError, StrategyUnavailableError
from .in_flight import FINISHED, InFlightCopy, drain_after, finished_copy
from .nvme.swapped_tensor import SwappedTensor
from .profiling import named_range
from .schema.model import StrategyConfig, strategy_config
from .stats import Counters, StrategyStats, summary
from .tensor_memory import check_kind, check_memory, goes_to_device, pair_problem
from .validation import validate, with_plain_signs


class HostToDeviceTransfer(ABC):
    """Copies tensors from host memory to an accelerator, with the bits of ``destination.copy_(source)``.

    The contract of every strategy:

    1. The destination ends as ``destination.copy_(source)`` would leave it, bit for bit; a NaN
       stays a NaN, with any payload. Invalid copies are refused before anything is written.
    2. Nothing outside the destination is written.
    3. The source may be changed or freed once ``InFlightCopy.release_source`` has returned.
    4. Pinned host memory and device scratch are bounded by the configuration, shown by ``pinned_bytes``
       and ``scratch_bytes``, and zero after ``close``.
    5. After an error, nothing is in flight, each element of the destination is its old or its own
       new value, and the next transfer works. Errors that are not ours arrive as they are.
    6. The copy runs after the work that is queued on the caller's current stream of the
       destination's device. The caller orders it with other streams.
    7. A strategy does one thing. A copy that it cannot make raises ``StrategyUnavailableError`` before anything is
       written. What ``build_transfer`` returns then takes another strategy.

    Thread-safe: threads may share one object. After a fork, the child gets ``ForkedProcessError``.

    Args:
        config: An instance of ``Config``, a mapping with its fields, or None for its defaults.
        accelerator: An ``Accelerator``, a registered name, or None for what ``get_accelerator()`` returns; nothing is
            called before the first transfer.
        fallback: Accepted and ignored: only what ``build_transfer`` returns falls back.
        **options: Fields of ``Config`` by name, in place of ``config``.

    Raises:
        ConfigError: A field is unknown or has a value that is not allowed.
    """

    #: The strategy's own configuration model.
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    #: The strategy's name in ``stats`` and in profilers; empty for the class's own name.
    name: ClassVar[str] = ""
    #: Whether it takes a ``SwappedTensor`` as the source.
    reads_swapped: ClassVar[bool] = False

    # Defaults, for a subclass without options that leaves out ``super().__init__``.
    config: Any = None
    fallback: bool = True
    _choice: AcceleratorChoice = AcceleratorChoice()
    _accelerator: Any = None  # the one in use since the last copy, or None
    _process: int | None = None
    _counters: Counters

    def __init_subclass__(cls, **options: Any) -> None:
        """Errors of ``accelerators`` become ours in what a strategy writes itself too."""
        super().__init_subclass__(**options)
        convert_errors_of(cls, "why_not", "prepare", "unprepare", "drain", "is_host_to_device", "close")

    def __new__(cls, *_args: Any, **_options: Any) -> Self:
        made = super().__new__(cls)
        made._counters = Counters()  # here, for subclasses that leave out ``super().__init__``
        return made

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
        self._choice = AcceleratorChoice(accelerator)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.config!r}, to {self._choice.name or 'the default'}, {summary(self)}>"

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator in use; where none was given, what ``get_accelerator()`` returns now.

        Where that has changed since the last copy, ``close`` is called first, which may block.

        Raises:
            AcceleratorFailedError: It is unknown, not an accelerator, or not available here.
        """
        current = self._choice.resolve()
        if current is not self._accelerator:
            self._use(current)
        return current

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that this object holds pinned now: buffers, and sources page-locked in place."""
        return 0

    @property
    def page_locked_bytes(self) -> int:
        """The part of ``pinned_bytes`` that is the caller's own memory, page-locked in place."""
        return 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device memory that this object holds now."""
        return 0

    def stats(self) -> dict[str, StrategyStats]:
        """The counts since this object was made, by strategy; never reset."""
        return {self.name or type(self).__name__: self._counters.total}

    def why_not(self, destination: Tensor, source: Tensor | SwappedTensor) -> str | None:
        """Why this strategy cannot make a copy from the host to the device, in one sentence, or None if it can.

        Pure; takes microseconds. Whether a copy pays off is for the policy to say. Subclasses ask ``super`` first.
        """
        return pair_problem(destination, source)

    def submit(self, destination: Tensor, source: Tensor | SwappedTensor) -> InFlightCopy:
        """Starts a copy. The strategy says how long this blocks; ``pageable`` blocks until the copy has ended.

        Args:
            destination: A tensor of any shape and strides on the device. Its ``requires_grad`` and graph stay as they
                are.
            source: A tensor of the same shape in host memory, or a ``SwappedTensor``, whose values are in a file, for
                strategies that read files (``reads_swapped``). Another floating-point dtype is cast, rounding to
                nearest even; every other dtype must equal the destination's. From the device it is a plain copy.

        Returns:
            The copy, which may still be running. Until it is waited for, the destination must not be read, freed or
            written. Two copies to one destination are not ordered.

        Raises:
            StrategyUnavailableError: It cannot make the copy, or the system refuses what it needs. Nothing is written.
            GraphCaptureError: The current stream of the destination's device records a graph. The graph is not touched.
            TransferError: The tensors or the accelerator are refused; see ``transfer.errors``.
            Exception: What the accelerator itself raises, as it is. Nothing is in flight then, and each element of
                the destination is its old or its new value.
        """
        return self._start(destination, source, waits=False)

    def copy(self, destination: Tensor, source: Tensor | SwappedTensor) -> None:
        """``submit``, then ``wait``: blocks until the destination holds the values; raises what they raise."""
        if type(self).submit is HostToDeviceTransfer.submit:
            self._start(destination, source, waits=True)
            return
        accelerator = self.accelerator
        try:  # a subclass that does more in `submit`
            self.submit(destination, source).wait()
        except BaseException as error:
            drain_after(error, accelerator, destination)
            raise

    def prepare(self, source: Tensor) -> None:
        """A hint: this storage will be copied from many times. Blocks for costly work, such as page-locking, once.

        Page-locking changes *other* code's copies: ``on_gpu.copy_(source, non_blocking=True)`` and
        ``source.copy_(on_gpu, non_blocking=True)`` were over when they returned, and are not any more. Synchronize
        before the source is written or read, or set ``pinned_direct.page_lock: false``.

        Raises:
            StrategyUnavailableError: It is refused. Nothing has changed then.
            InvalidTensorError, GraphCaptureError: As ``submit``. Nothing has changed then.
        """
        check_memory(source, "source")

    def would_page_lock(self, source: Tensor) -> bool:  # noqa: ARG002
        """Whether ``prepare`` would page-lock a source, as far as is known before it is tried."""
        return False

    def unprepare(self, source: Tensor) -> None:
        """Undoes ``prepare`` for this storage, as freeing it and ``close`` do. Blocks until no copy here reads it."""
        check_kind(source, "source")

    @raising_ours
    def drain(self) -> None:
        """Blocks until the device is idle, as after an error. Raises what the accelerator reports."""
        if self._accelerator is not None and not self._is_forked:
            self._accelerator.synchronize()

    @raising_ours
    def is_host_to_device(self, destination: Tensor, source: Tensor | SwappedTensor) -> bool:
        """Whether ``submit`` takes a copy from host memory, or from a file, to ``accelerator``. Raises as that does."""
        return pair_problem(destination, source) is None and goes_to_device(self.accelerator, destination, source)

    def close(self) -> None:
        """Waits for what is in flight and gives back every pinned byte. Idempotent; a later ``submit`` pins anew.

        Raises:
            Exception: What the accelerator reports. What could not be given back stays pinned, for the next ``close``.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, destination: Tensor, source: Any, *, waits: bool) -> InFlightCopy:
        self._check_process()
        if not validate(destination, source):
            return FINISHED
        if isinstance(source, Tensor):
            destination, source = with_plain_signs(destination.detach(), source.detach())
        elif not self.reads_swapped:
            others = "`nvme_swapped`, by what build_transfer returns, or by transfer.nvme.swap_in"
            raise NotATensorError(f"{type(self).__name__} copies tensors: {source} is read by {others}")
        accelerator = self.accelerator
        check_capture(accelerator, destination.device.index)
        # One frame for submit and wait: between two of them, Ctrl-C would leave a copy in flight.
        records = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # what `no_grad` does, for a tenth of its time
            copy = self._run(accelerator, destination.detach(), source, waits)
            if waits:
                copy.wait()
            return copy
        except BaseException as error:
            drain_after(error, accelerator, destination)
            raise
        finally:
            torch._C._set_grad_enabled(records)

    def _run(self, accelerator: Accelerator, destination: Tensor, source: Any, waits: bool) -> InFlightCopy:
        """Makes one copy: a plain one within the host or the device, else the strategy's own, if it can make it."""
        if isinstance(source, Tensor) and not goes_to_device(accelerator, destination, source):
            copy = finished_copy(accelerator, destination, source, self._counters)
            self._counters.add(copies=1, bytes=destination.nbytes)
            return copy
        obstacle = self.why_not(destination, source)
        if obstacle is not None:
            raise StrategyUnavailableError(f"`{self.name or type(self).__name__}` cannot make this copy. {obstacle}")
        return self._perform(accelerator, destination, source, waits)

    def _perform(self, accelerator: Accelerator, destination: Tensor, source: Any, waits: bool) -> InFlightCopy:
        """Makes a copy that ``why_not`` has let pass, counted and marked for profilers."""
        if accelerator is not self._accelerator:
            self._use(accelerator)
        with named_range(accelerator, self.name or type(self).__name__):
            copy = (self._submit_for_copy if waits else self._submit)(destination, source)
        self._counters.add(copies=1, bytes=destination.nbytes)
        return copy

    @abstractmethod
    def _submit(self, destination: Tensor, source: Any) -> InFlightCopy:
        """Starts a copy from the host to the device that ``submit`` has validated and ``why_not`` has let pass.

        Called under ``no_grad`` with detached tensors of equal shape and at least one element, or with a
        ``SwappedTensor`` where the class ``reads_swapped``. When it raises, ``submit`` waits for the device.

        Raises:
            StrategyUnavailableError: The system refuses what the strategy needs. Nothing may be written then.
        """

    def _submit_for_copy(self, destination: Tensor, source: Any) -> InFlightCopy:
        """As ``_submit``, for ``copy``: the host waits at once, so it has nothing else to do meanwhile."""
        return self._submit(destination, source)

    def _use(self, accelerator: Accelerator) -> None:
        """Sends copies to this accelerator from now on. What is held belongs to the one before, and is closed."""
        if self._accelerator is not None:
            self.close()
        self._accelerator = accelerator

    @property
    def _is_forked(self) -> bool:
        return self._process not in (None, os.getpid())

    def _check_process(self) -> None:
        if self._is_forked:
            raise ForkedProcessError(
                f"this {type(self).__name__} was first used in process {self._process} and cannot be used "
                f"in its fork {os.getpid()}; build a new one there"
            )
        self._process = os.getpid()
