"""The destination ends as ``destination.copy_(source)`` would leave it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.testing import check_values

from ..interface import HostToDeviceTransfer
from ._hooks import (
    Hooks,
    as_it_is_and_cast,
    check_copy,
    described,
    each_kind_of_source,
    from_bits,
    host_source,
    kinds_here,
    random_bits,
    read,
)

# fp32 bits, and the bits that round-to-nearest-even gives in bf16 and fp16. From IEEE 754: ties go
# to the even neighbour, what rounds past the largest finite value is inf, subnormals are kept.
ROUNDING = (
    (0x3F808000, 0x3F80, 0x3C04),
    (0x3F818000, 0x3F82, 0x3C0C),
    (0x3F828000, 0x3F82, 0x3C14),
    (0x3F808001, 0x3F81, 0x3C04),
    (0x3F807FFF, 0x3F80, 0x3C04),
    (0x3E89CCD5, 0x3E8A, 0x344E),
    (0x7F7F7FFF, 0x7F7F, 0x7C00),
    (0x7F7F8000, 0x7F80, 0x7C00),
    (0x7F7FFFFF, 0x7F80, 0x7C00),
    (0xFF7FFFFF, 0xFF80, 0xFC00),
    (0x477FE000, 0x4780, 0x7BFF),
    (0x477FEFFF, 0x4780, 0x7BFF),
    (0x477FF000, 0x4780, 0x7C00),
    (0x47BC0000, 0x47BC, 0x7C00),
    (0x00008000, 0x0000, 0x0000),
    (0x00008001, 0x0001, 0x0000),
    (0x00018000, 0x0002, 0x0000),
    (0x007FFFFF, 0x0080, 0x0000),
    (0x007F8000, 0x0080, 0x0000),
    (0x00000001, 0x0000, 0x0000),
    (0x80000001, 0x8000, 0x8000),
    (0x80000000, 0x8000, 0x8000),
    (0x33000000, 0x3300, 0x0000),
    (0x33000001, 0x3300, 0x0001),
    (0x387FE000, 0x3880, 0x0400),
    (0x387FF000, 0x3880, 0x0400),
    (0x36D70000, 0x36D7, 0x006C),
    (0x7F800000, 0x7F80, 0x7C00),
    (0xFF800000, 0xFF80, 0xFC00),
)


class SameBits(Hooks):
    """Contract, point 1: values and dtypes. Results are read without a wait: ``copy`` was to wait."""

    @pytest.mark.parametrize(("dtype", "column"), [(torch.bfloat16, 1), (torch.float16, 2)])
    def test_rounds_to_nearest_even(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, dtype: torch.dtype, column: int
    ) -> None:
        for turn, kind in enumerate(kinds_here(accelerator)):
            copies = (67, 1, 30)[turn]
            values = from_bits([row[0] for row in ROUNDING]).repeat_interleave(copies)
            rounded = torch.tensor([row[column] for row in ROUNDING]).to(torch.int16).view(dtype)
            self._copies(accelerator, transfer, values, kind, dtype, rounded.repeat_interleave(copies))

    def test_a_nan_stays_a_nan(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        # The last of these is a payload that plain truncation to bf16 would turn into inf.
        values = from_bits([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001])
        for kind, dtype in itertools.product(kinds_here(accelerator), (torch.bfloat16, torch.float16, torch.float32)):
            destination = accelerator.device_empty(4, dtype=dtype)
            destination.fill_(1)
            with host_source(accelerator, transfer, values, kind) as source:
                transfer.copy(destination, source)
                got = read(accelerator, destination).float().isnan().tolist()
                assert got == [True] * 4, f"{described(kind, dtype)}: which of four NaNs are one: {got}"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_equals_a_direct_copy(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, dtype: torch.dtype
    ) -> None:
        kinds = itertools.cycle(kinds_here(accelerator))
        for numel in (1, 2, 999, 1000, 1001, 20_007):
            self._copies(accelerator, transfer, random_bits(numel, seed=numel), next(kinds), dtype)

    @each_kind_of_source
    @as_it_is_and_cast
    def test_whatever_memory_the_source_is_in(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, kind: str, dtype: torch.dtype
    ) -> None:
        for numel in (1, 1003, self.several_chunks):
            self._copies(accelerator, transfer, random_bits(numel, seed=numel), kind, dtype)

    def test_more_than_a_mebibyte(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        self._copies(accelerator, transfer, random_bits(530_001, seed=2), "pageable", torch.bfloat16)

    def test_every_pair_of_dtypes(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        kinds = itertools.cycle(kinds_here(accelerator))
        for source_dtype, dtype in itertools.product(dtypes, dtypes):
            self._copies(accelerator, transfer, random_bits(1003, seed=1).to(source_dtype), next(kinds), dtype)

    def test_two_dtypes_in_turn(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        kinds = itertools.cycle(reversed(kinds_here(accelerator)))
        for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)):
            self._copies(accelerator, transfer, random_bits(2000, seed), next(kinds), dtype)

    def test_negative_views(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        """Torch itself drops their signs in some casts on the host. A strategy has the right ones, or refuses."""
        kinds = itertools.cycle(kinds_here(accelerator))
        dtypes = ((torch.float32, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16))
        for numel, (source_dtype, dtype) in itertools.product((1, 1003), dtypes):
            values, kind = torch.linspace(-3, 5, numel).to(source_dtype), next(kinds)
            destination = accelerator.device_empty(numel, dtype=dtype)
            with host_source(accelerator, transfer, values, kind) as source:
                transfer.copy(destination, torch._neg_view(source))
                expected = (-values).to(dtype)
                check_copy(accelerator, destination, expected, f"{described(kind, dtype, source_dtype)}, negated")

    @staticmethod
    def _copies(
        accelerator: Accelerator,
        transfer: HostToDeviceTransfer,
        values: Tensor,
        kind: str,
        dtype: torch.dtype,
        expected: Tensor | None = None,
    ) -> None:
        """Copies values from one kind of memory. Where nothing else is expected, they arrive as torch casts them."""
        destination = accelerator.device_empty(values.numel(), dtype=dtype)
        with host_source(accelerator, transfer, values, kind) as source:
            transfer.copy(destination, source)
            check_copy(
                accelerator,
                destination,
                values.to(dtype) if expected is None else expected,
                described(kind, dtype, values.dtype),
            )
            check_values(source, values, f"{described(kind, dtype, values.dtype)}: the source itself")

    def test_no_elements(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        for shape in ((0,), (0, 8), (3, 0, 2)):
            transfer.copy(accelerator.device_empty(*shape, dtype=torch.bfloat16), torch.empty(shape))
        transfer.copy(accelerator.device_empty(8, dtype=torch.bfloat16)[5:5], torch.ones(8)[3:3])
        assert transfer.pinned_bytes == 0
        destination = accelerator.device_empty(3, dtype=torch.bfloat16)
        transfer.copy(destination, torch.arange(3.0))
        assert read(accelerator, destination).tolist() == [0, 1, 2]

    def test_a_scalar(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destination = accelerator.device_empty(dtype=torch.float16)
        transfer.copy(destination, torch.tensor(2.5))
        assert read(accelerator, destination).item() == 2.5
