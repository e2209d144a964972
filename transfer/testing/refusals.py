"""Invalid copies are refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator

from ..errors import (
    InvalidTensorError,
    NotATensorError,
    StrategyUnavailableError,
    TransferError,
    UnsupportedDtypeError,
)
from ..interface import HostToDeviceTransfer
from ._hooks import DTYPES, GUARD, Hooks, check_copy, read


class Wrapped(Tensor):
    """A tensor without memory of its own, as a DTensor or a quantised one is: the values are in another one."""

    within: Tensor

    @staticmethod
    def __new__(cls, within: Tensor) -> Wrapped:
        make: Any = Tensor._make_wrapper_subclass
        made: Wrapped = make(cls, within.shape, dtype=within.dtype, device=within.device, strides=within.stride())
        made.within = within
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = func(*(each.within if isinstance(each, cls) else each for each in args), **(kwargs or {}))
        return cls(result) if isinstance(result, Tensor) else result


class Plain(Tensor):
    """A subclass that is its memory."""


class Refuses(Hooks):
    """Contract, points 1 and 2: what is refused, and what autograd and inference mode change."""

    def test_it_copies_or_says_why_not(self, accelerator: Accelerator) -> None:
        destination = accelerator.device_empty(6, dtype=torch.float32)
        destination.fill_(GUARD)
        accelerator.synchronize()
        with self.make_transfer(accelerator) as transfer:
            try:
                transfer.copy(destination, torch.arange(6.0))
            except StrategyUnavailableError:
                assert transfer.why_not(destination, torch.arange(6.0)) is not None, "it should have said so beforehand"
                assert (read(accelerator, destination) == GUARD).all()
            else:
                assert read(accelerator, destination).tolist() == [0, 1, 2, 3, 4, 5]

    def test_refusals_write_nothing(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destination = accelerator.device_empty(6, dtype=torch.float32)
        destination.fill_(GUARD)
        shrunk = torch.zeros(6)
        shrunk.untyped_storage().resize_(8)
        refused = [
            (torch.zeros(5), InvalidTensorError),
            (torch.zeros(1), InvalidTensorError),
            (torch.zeros(2, 3), InvalidTensorError),
            (torch.zeros(6, device="meta"), InvalidTensorError),
            (torch.zeros(6).to_sparse(), InvalidTensorError),
            (shrunk, InvalidTensorError),
            (torch.zeros(6, dtype=torch.int32), UnsupportedDtypeError),
            (torch.zeros(6, dtype=torch.complex64), UnsupportedDtypeError),
            (torch.zeros(6, dtype=torch.bool), UnsupportedDtypeError),
            (torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)], layout=torch.jagged), InvalidTensorError),
            (torch.nn.parameter.UninitializedParameter(), InvalidTensorError),
            (None, NotATensorError),
            ([0.0] * 6, NotATensorError),
        ]
        for source, error in refused:
            with pytest.raises(error) as caught:
                transfer.submit(destination, source)  # type: ignore[arg-type]  # what is wrong is the point
            assert "destination: torch.float32 (6,)" in str(caught.value)
            assert "source: " in str(caught.value)
            assert isinstance(caught.value, TransferError)
        assert (read(accelerator, destination) == GUARD).all()
        transfer.copy(destination, torch.arange(6.0))
        assert read(accelerator, destination).tolist() == [0, 1, 2, 3, 4, 5]

    def test_tensors_without_memory_of_their_own_are_refused(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        for dtype in DTYPES:  # the address of each such tensor is 0: it may pass for the same memory, or overlap
            destination = accelerator.device_empty(6, dtype=dtype)
            destination.fill_(GUARD)
            values = torch.arange(6.0)
            functional = torch._to_functional_tensor(values)
            for pair in (
                (destination, Wrapped(values)),
                (destination, functional),
                (Wrapped(destination), values),
                (Wrapped(destination), Wrapped(values)),
            ):
                with pytest.raises(InvalidTensorError, match="no memory of its own"):
                    transfer.submit(*pair)
                assert not transfer.is_host_to_device(*pair)
            for source in (Wrapped(values), functional):
                with pytest.raises(InvalidTensorError, match="no memory of its own"):
                    transfer.prepare(source)
            assert (read(accelerator, destination) == GUARD).all()
            plain = values.as_subclass(Plain)
            transfer.copy(destination, plain)
            assert read(accelerator, destination).tolist() == [0, 1, 2, 3, 4, 5], "a plain subclass is its memory"

    def test_a_destination_that_overlaps_itself_is_refused(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        memory = accelerator.device_empty(8, dtype=torch.float32)
        memory.fill_(GUARD)
        for destination in (memory[:1].expand(4), memory.as_strided((3, 3), (2, 1)), memory.as_strided((2, 2), (1, 1))):
            with pytest.raises(InvalidTensorError, match="share memory"):
                transfer.submit(destination, torch.zeros(destination.shape))
        assert (read(accelerator, memory) == GUARD).all()
        # These strides look alike and do not overlap: offsets 0, 2, 4, 3, 5, 7.
        transfer.copy(memory.as_strided((2, 3), (3, 2)), torch.arange(6.0).view(2, 3))
        assert read(accelerator, memory).tolist() == [0, GUARD, 1, 3, 2, 4, GUARD, 5]

    def test_partial_overlap_is_refused_and_the_same_memory_is_not(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        memory = accelerator.device_empty(12, dtype=torch.float32)
        memory.copy_(torch.arange(12.0))
        transfer.copy(memory, memory)
        with pytest.raises(InvalidTensorError, match="overlap"):
            transfer.submit(memory[1:], memory[:-1])
        assert read(accelerator, memory).tolist() == list(range(12))
        transfer.copy(memory[::2], memory[1::2])
        assert read(accelerator, memory).tolist() == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11]
        memory.copy_(torch.arange(12.0))
        transfer.copy(memory.view(1, 12), memory.as_strided((1, 12), (99, 1)))  # a stride that nothing uses
        transfer.copy(memory.view(2, 6)[:, :2], memory[2:6].view(2, 2))  # side by side, one of them dense
        assert read(accelerator, memory).tolist() == [2, 3, 2, 3, 4, 5, 4, 5, 8, 9, 10, 11]
        with pytest.raises(InvalidTensorError, match="overlap"):
            transfer.submit(memory.view(2, 6)[:, :2], memory[3:7].view(2, 2))

    def test_requires_grad_is_left_alone(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = torch.arange(800.0, requires_grad=True)
        plain = accelerator.device_empty(800, dtype=torch.bfloat16)
        leaf = accelerator.device_empty(800, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3):
            transfer.copy(plain, source)
            transfer.copy(leaf, source)
        assert not plain.requires_grad
        assert plain.grad_fn is None
        assert leaf.requires_grad
        assert leaf.is_leaf
        for destination in (plain, leaf):
            check_copy(accelerator, destination, torch.arange(800.0).bfloat16(), "a source that requires grad")

    def test_first_use_in_inference_mode(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destination = accelerator.device_empty(1000, dtype=torch.bfloat16)
        with torch.inference_mode():
            transfer.copy(destination, torch.ones(1000))
        transfer.copy(destination, torch.full((1000,), 2.0))
        assert (read(accelerator, destination) == 2).all()

    def test_an_inference_destination_outside_inference_mode(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        with torch.inference_mode():
            destination = accelerator.device_empty(4, dtype=torch.float32) + 0
        if not destination.is_inference():
            pytest.skip("This accelerator's memory is never an inference tensor.")
        with pytest.raises(RuntimeError, match="inference"):
            transfer.submit(destination, torch.zeros(4))

    def test_rebound_storage_is_followed(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        master = torch.nn.Parameter(torch.full((700,), 1.0))
        destination = accelerator.device_empty(700, dtype=torch.bfloat16)
        pinned = accelerator.pin_empty(700, dtype=torch.float32)
        pinned.fill_(2)
        for value, storage in ((1, master.data), (2, pinned), (3, torch.full((700,), 3.0))):
            master.data = storage
            transfer.copy(destination, master)
            assert (read(accelerator, destination) == value).all()
        accelerator.synchronize()
        accelerator.unpin_memory(pinned)
