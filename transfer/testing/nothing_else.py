"""Nothing outside the destination is written, for any strides."""

from __future__ import annotations

import torch

from accelerators import Accelerator
from accelerators.testing import bits

from ..interface import HostToDeviceTransfer
from ._hooks import GUARD, Hooks, random_bits, read


class WritesNothingElse(Hooks):
    """Contract, point 2: strides, gaps and neighbours."""

    def test_strided_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        parent = accelerator.device_empty(2000, dtype=torch.float32)
        parent.fill_(GUARD)
        transfer.copy(parent[::2], torch.arange(1000.0))
        expected = torch.full((2000,), GUARD)
        expected[::2] = torch.arange(1000.0)
        assert torch.equal(read(accelerator, parent), expected)

    def test_transposed_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        storage = accelerator.device_empty(3, 4, dtype=torch.float32)
        transfer.copy(storage.t(), torch.arange(12.0).view(4, 3))
        assert read(accelerator, storage).flatten().tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]

    def test_large_transposed_destination(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        storage = accelerator.device_empty(40, 700, dtype=torch.bfloat16)
        source = random_bits(28_000, seed=3).view(700, 40)
        transfer.copy(storage.t(), source)
        assert torch.equal(bits(read(accelerator, storage)), bits(source.t().contiguous().to(torch.bfloat16)))

    def test_strided_source(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = torch.arange(4000.0).view(50, 80)
        for view in (source[::2], source.t(), source[:, 3:40], source[5, :1].expand(600, 1)):
            destination = accelerator.device_empty(*view.shape, dtype=torch.float32)
            transfer.copy(destination, view)
            assert torch.equal(read(accelerator, destination), view)

    def test_both_sides_strided(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = torch.arange(6000.0).view(60, 100).t()[:, ::3]
        parent = accelerator.device_empty(20, 200, dtype=torch.float32)
        parent.fill_(GUARD)
        transfer.copy(parent.t()[::2], source)
        expected = torch.full((20, 200), GUARD)
        expected.t()[::2] = source
        assert torch.equal(read(accelerator, parent), expected)

    def test_neighbours_are_untouched(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        parent = accelerator.device_empty(3000, dtype=torch.bfloat16)
        parent.fill_(GUARD)
        transfer.copy(accelerator.device_empty(5000, dtype=torch.bfloat16), torch.full((5000,), 9.0))
        transfer.copy(parent[1000:2003], torch.arange(1003.0))
        got = read(accelerator, parent).float()
        assert (got[:1000] == GUARD).all()
        assert torch.equal(got[1000:2003], torch.arange(1003.0).bfloat16().float())
        assert (got[2003:] == GUARD).all()
