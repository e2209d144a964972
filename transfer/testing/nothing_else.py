"""Nothing outside the destination is written, for any strides."""

from __future__ import annotations

import itertools

import torch

from accelerators import Accelerator

from ..interface import HostToDeviceTransfer
from ._hooks import DTYPES, GUARD, Hooks, check_copy, described, host_source, kinds_here, random_bits, read


class WritesNothingElse(Hooks):
    """Contract, point 2: strides, gaps and neighbours."""

    def test_strided_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        for kind in kinds_here(accelerator):
            parent = accelerator.device_empty(2000, dtype=torch.float32)
            parent.fill_(GUARD)
            with host_source(accelerator, transfer, torch.arange(1000.0), kind) as source:
                transfer.copy(parent[::2], source)
                expected = torch.full((2000,), GUARD)
                expected[::2] = torch.arange(1000.0)
                check_copy(accelerator, parent, expected, f"{kind} source, every other element")

    def test_transposed_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        storage = accelerator.device_empty(3, 4, dtype=torch.float32)
        transfer.copy(storage.t(), torch.arange(12.0).view(4, 3))
        assert read(accelerator, storage).flatten().tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]

    def test_large_transposed_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        storage = accelerator.device_empty(40, 700, dtype=torch.bfloat16)
        source = random_bits(28_000, seed=3).view(700, 40)
        transfer.copy(storage.t(), source)
        check_copy(accelerator, storage, source.t().contiguous().to(torch.bfloat16), "transposed")

    def test_strided_source(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = torch.arange(4000.0).view(50, 80)
        for view in (source[::2], source.t(), source[:, 3:40], source[5, :1].expand(600, 1)):
            destination = accelerator.device_empty(*view.shape, dtype=torch.float32)
            transfer.copy(destination, view)
            check_copy(accelerator, destination, view, f"a source of strides {view.stride()}")

    def test_both_sides_strided(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = torch.arange(6000.0).view(60, 100).t()[:, ::3]
        parent = accelerator.device_empty(20, 200, dtype=torch.float32)
        parent.fill_(GUARD)
        transfer.copy(parent.t()[::2], source)
        expected = torch.full((20, 200), GUARD)
        expected.t()[::2] = source
        check_copy(accelerator, parent, expected, "both sides strided")

    def test_neighbours_are_untouched(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        transfer.copy(accelerator.device_empty(5000, dtype=torch.bfloat16), torch.full((5000,), 9.0))
        for kind, dtype in itertools.product(kinds_here(accelerator), DTYPES):
            parent = accelerator.device_empty(3000, dtype=dtype)
            parent.fill_(GUARD)
            with host_source(accelerator, transfer, torch.arange(1003.0), kind) as source:
                transfer.copy(parent[1000:2003], source)
                expected = torch.full((3000,), GUARD, dtype=dtype)
                expected[1000:2003] = torch.arange(1003.0)
                check_copy(accelerator, parent, expected, f"{described(kind, dtype)}, between neighbours")
