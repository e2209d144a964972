"""The gradients of one ZeRO-3 optimizer: on the host in the dtype of reductions, once."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator

from ...in_flight import InFlightCopy, finish_stream
from ...interface import HostToDeviceTransfer
from ..stage3 import GradientState, Stage3, SwappedState, computes_at_once
from .buffers import Buffers
from .lazy_gradient import LazyGradient
from .master_gradient import MasterGradient, Piece, StepGradient
from .taking_over import can_take, keep_what_differs


class HostGradients:
    """Takes DeepSpeed's fp32 gradients over, and serves the reductions of backward.

    A reduction leaves a parameter's gradient on the device, where its norm is taken; from there it goes to the host,
    once. Where reductions accumulate, what is there is brought to the device by the transfer first.

    DeepSpeed's fp32 buffer keeps what the last reduction before a step left until the next such one. So while other
    reductions accumulate, they write another buffer: the two of a parameter take turns. It exists where they do.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer, of which ``GradientState.why_not_once`` says nothing.
        transfer: Makes the copies to the device.

    Attributes:
        saved_bytes: Of the fp32 buffers that were given back.
    """

    def __init__(self, optimizer: Any, transfer: HostToDeviceTransfer) -> None:
        self.saved_bytes = 0
        self._transfer = transfer
        self._optimizer = weakref.ref(optimizer)  # which holds us, by its gradients
        self._buffers = Buffers(self._state.accumulated, transfer)
        self._masters: dict[int, MasterGradient] = {}
        self._swapped: dict[int, MasterGradient] = {}  # those of them whose sub-groups are in files
        self._pieces: dict[int, tuple[MasterGradient, Piece, int]] = {}  # with where its buffer's part begins
        self._reducing: Collection[int] = ()  # those of which DeepSpeed may write now what was reduced
        self._final: set[Piece] = set()  # and those of them that it has written to its fp32 buffer
        self._events: list[Any] = []
        self._copies: list[InFlightCopy] = []

    @property
    def _state(self) -> GradientState:
        return GradientState(Stage3(self._optimizer()))

    def take_over(self) -> None:
        """Gives back the fp32 buffer of each sub-group that is updated on the host.

        Blocks while each is compared with the cast of what was accumulated: what differs is kept as it is.
        """
        state, base = self._state, 0
        for sub_group_id in state.stage3.sub_groups:
            parameters = state.parameters(sub_group_id)
            numel = sum(each.numel for each in parameters)
            if can_take(state, sub_group_id, self._buffers[0], base, self._transfer.accelerator.on_host):
                make = functools.partial(self._make, sub_group_id)
                taken = MasterGradient(
                    self._buffers, base, parameters, torch.float32, self.settle, self._is_reduced, make
                )
                if state.stage3.is_swapped(sub_group_id):
                    self._take_from_files(state, sub_group_id, taken)
                else:
                    self._take_buffer(state, sub_group_id, taken)
                for piece in taken.pieces:
                    self._pieces[piece.parameter.key] = (taken, piece, base + piece.parameter.offset)
            base += numel
        empty = getattr(self._transfer.accelerator, "empty_host_cache", None)
        if self.saved_bytes and empty is not None:
            empty()

    def _take_buffer(self, state: GradientState, sub_group_id: int, taken: MasterGradient) -> None:
        before = state.stage3.master(sub_group_id).grad
        keep_what_differs(taken, before, [(0, taken.numel)])
        self._masters[sub_group_id] = taken
        state.stage3.master(sub_group_id).grad = LazyGradient(taken, 0, taken.numel)
        self.saved_bytes += before.nbytes
        state.unpin(before)

    def _take_from_files(self, state: GradientState, sub_group_id: int, taken: MasterGradient) -> None:
        swapped = SwappedState(state.stage3, sub_group_id)
        with swapped.gradient() as (before, ranges):
            keep_what_differs(taken, before, ranges)
        self._masters[sub_group_id] = self._swapped[sub_group_id] = taken
        swapped.show_gradient(LazyGradient(taken, 0, taken.numel))

    def show(self, sub_group_id: int) -> None:
        """Lets DeepSpeed read the gradient of a swapped sub-group: it has dropped it after a step. Idempotent."""
        taken = self._swapped.get(sub_group_id)
        if taken is not None:
            SwappedState(self._state.stage3, sub_group_id).show_gradient(LazyGradient(taken, 0, taken.numel))

    def show_all(self) -> None:
        """As ``show``, for each: setting a master drops its gradient, and DeepSpeed may read ahead. Idempotent."""
        for sub_group_id in self._swapped:
            self.show(sub_group_id)

    def of_step(self, sub_group_id: int) -> LazyGradient | None:
        """The gradient of a swapped sub-group for one step, which may scale it; None where DeepSpeed has it."""
        taken = self._swapped.get(sub_group_id)
        return None if taken is None else LazyGradient(StepGradient(taken), 0, taken.numel)

    def hold(self, sub_group_id: int) -> None:
        """Lets DeepSpeed have the fp32 buffer of a sub-group again. Idempotent."""
        if sub_group_id in self._masters:
            self._masters[sub_group_id].hold()

    @contextlib.contextmanager
    def reducing(self, params_to_release: Sequence[Any], grad_partitions: Sequence[Tensor]) -> Iterator[None]:
        """Within the block, DeepSpeed reduces its parts of gradients on the device; the arguments are its own.

        It works on copies on the device, which go to the host when the block ends, behind what is queued on the current
        stream. Does not block, where what is accumulated is pinned.
        """
        state, accelerator = self._state, self._transfer.accelerator
        sizes = {state.key(each): part.numel() for each, part in zip(params_to_release, grad_partitions, strict=False)}
        on_device: dict[int, Tensor] = {}
        self._reducing = on_device
        try:
            find = functools.partial(self._on_device, state, accelerator, sizes, on_device)
            with state.reducing_into(find), state.receiving(self._receive):
                yield
            for key, reduced in on_device.items():
                self._to_host(state, accelerator, key, reduced)
            if on_device:
                self._mark(accelerator, on_device)
        finally:
            self._reducing, self._final = (), set()

    @contextlib.contextmanager
    def finalizing(self) -> Iterator[None]:
        """Within the block, DeepSpeed takes over what was accumulated, where the caller says when that is."""
        self.settle()
        self._reducing = self._pieces
        try:
            with self._state.receiving(self._receive):
                yield
            for piece in self._final:
                self._pieces[piece.parameter.key][0].reduced(piece)
        finally:
            self._reducing, self._final = (), set()

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Within the block, the check for overflow looks at the extremes of what it would look at: all is read once."""
        self.settle()
        extremes = self._buffers.extremes([(piece, begin) for _, piece, begin in self._pieces.values()])
        with contextlib.nullcontext() if extremes is None else self._state.judging(extremes):
            yield

    def settle(self) -> None:
        """Blocks until what reductions have queued is on the host. What they read and write there stays page-locked."""
        for event in self._events:
            event.synchronize()
        self._events.clear()
        for copy in self._copies:
            copy.wait()
        self._copies.clear()
        self._buffers.prepare()

    def use(self, transfer: HostToDeviceTransfer) -> None:
        """Makes copies with another transfer from now on. Blocks. Nothing has changed where that fails."""
        self.settle()
        self._buffers.use(transfer)
        self._transfer = transfer

    def give_back(self) -> None:
        """Gives DeepSpeed everything back as it would be without us. Blocks. Idempotent."""
        self.settle()
        state = self._state
        for taken in tuple(self._masters.values()):
            taken.hold()
        first = self._buffers[0]
        for key, (_, piece, begin) in self._pieces.items():
            here = first.narrow(0, begin, piece.parameter.numel)
            if piece.current:
                here.copy_(self._buffers.part(piece, begin))
                state.move(key, here)
        self._masters, self._pieces, self._swapped = {}, {}, {}
        self._buffers.unprepare()

    def forget(self) -> None:
        """The optimizer goes: its lazy gradients go first, which nobody must unpin."""
        with contextlib.suppress(Exception):
            self.settle()
        stage3 = self._state.stage3
        for sub_group_id, taken in self._masters.items():
            if sub_group_id in self._swapped:
                SwappedState(stage3, sub_group_id).hide_gradient()
            elif taken.memory is None:
                stage3.master(sub_group_id).grad = None
        self._masters, self._pieces, self._swapped = {}, {}, {}
        self._buffers.unprepare()

    def _receive(self, sub_group_id: int, offset: int, values: Tensor) -> bool:
        """Takes a part of the gradient that DeepSpeed would write to a file."""
        taken = self._swapped.get(sub_group_id)
        if taken is None:
            return False
        taken.write(offset, values)
        self.show(sub_group_id)
        return True

    def _on_device(
        self,
        state: GradientState,
        accelerator: Accelerator,
        sizes: Mapping[int, int],
        on_device: dict[int, Tensor],
        key: int,
    ) -> Tensor | None:
        """Where DeepSpeed reduces a parameter's gradient; None: where it does without us."""
        taken, piece, begin = self._pieces.get(key, (None, None, 0))
        if taken is None or piece is None or taken.memory is not None or key not in sizes:
            return None
        if key not in on_device:
            made = accelerator.device_empty(sizes[key], dtype=self._buffers[0].dtype)
            if state.accumulates:
                if piece.arrival is not None:
                    piece.arrival.synchronize()  # of an earlier backward, which has waited for it
                copy = self._transfer.submit(made, self._buffers.part(piece, begin).narrow(0, 0, made.numel()))
                if computes_at_once() or getattr(self._transfer.config, "verify", "off") != "off":
                    copy.wait()  # to compare it, before it is added to
                else:
                    copy.order_after(accelerator.current_stream(made.device.index))
                    self._copies.append(copy)
            on_device[key] = made
        return on_device[key]

    def _to_host(self, state: GradientState, accelerator: Accelerator, key: int, reduced: Tensor) -> None:
        taken, piece, begin = self._pieces[key]
        is_final = piece in self._final
        if not is_final and piece.current == piece.final:  # DeepSpeed's fp32 buffer keeps these values
            if len(self._buffers) == 1:
                self._buffers.append(state.zeros(self._buffers[0].numel(), self._buffers[0].dtype))
            piece.current = 1 - piece.current
            state.move(key, self._buffers.part(piece, begin))
        accelerator.enqueue_copy(self._buffers.part(piece, begin).narrow(0, 0, reduced.numel()), reduced)
        if is_final:
            taken.reduced(piece)

    def _mark(self, accelerator: Accelerator, reduced: Iterable[int]) -> None:
        """Notes that what is queued now must have ended before the host reads what was accumulated."""
        self._copies = [each for each in self._copies if not each.done]
        self._events = [each for each in self._events if not each.query()]
        if accelerator.Event is None:
            finish_stream(accelerator, accelerator.current_stream(), None)
            return
        event = accelerator.Event()
        event.record()
        self._events.append(event)
        for key in reduced:
            self._pieces[key][1].arrival = event

    def _is_reduced(self, piece: Piece) -> bool:
        """Whether DeepSpeed writes to its fp32 buffer what it has just reduced."""
        if piece.parameter.key not in self._reducing:
            return False
        self._final.add(piece)
        return True

    def _make(self, sub_group_id: int, taken: MasterGradient) -> Tensor:
        """The real gradient of a sub-group, in the place of the lazy one."""
        optimizer = self._optimizer()
        if optimizer is None:
            return taken.read(0, taken.numel)
        state = self._state
        if self._swapped.pop(sub_group_id, None) is not None:
            # It lives until the sub-group's next step, and nobody copies it to the device.
            made = taken.read(0, taken.numel)
            SwappedState(state.stage3, sub_group_id).show_gradient(made)
            return made
        made = state.zeros(taken.numel, taken.dtype)
        taken.read(0, taken.numel, out=made)
        master = state.stage3.master(sub_group_id)
        if isinstance(master.grad, LazyGradient):
            master.grad = made
        self.saved_bytes -= made.nbytes
        return made
