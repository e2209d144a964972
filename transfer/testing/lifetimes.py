"""When the source is free again, and when pinned memory is."""

from __future__ import annotations

import gc

import torch

from accelerators import Accelerator
from accelerators.testing import fetch

from ..interface import HostToDeviceTransfer
from ._hooks import GUARD, Hooks


class Lifetimes(Hooks):
    """Contract, points 3 and 4."""

    def test_the_source_is_free_after_release_source(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        source, destination = torch.arange(5000.0), accelerator.device_empty(5000, dtype=torch.float32)
        copy = transfer.submit(destination, source)
        copy.release_source()
        source.fill_(GUARD)
        copy.wait()
        assert torch.equal(destination.cpu(), torch.arange(5000.0))

    def test_sources_dropped_at_once(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        copies = []
        for seed in range(3):
            destination = accelerator.device_empty(1, dtype=torch.float32)
            values = torch.randn(1, generator=torch.Generator().manual_seed(seed))
            copies.append((transfer.submit(destination, values), destination))
        del values
        gc.collect()
        for copy, _ in copies:
            copy.wait()
        got = [round(destination.cpu().item(), 4) for _, destination in copies]
        assert got == [1.5410, 0.6614, 0.3923]

    def test_a_source_on_the_device(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = accelerator.device_empty(1000, dtype=torch.float32)
        source.copy_(torch.arange(1000.0))
        destination = accelerator.device_empty(1000, dtype=torch.bfloat16)
        transfer.copy(destination, source)
        assert torch.equal(destination.cpu(), torch.arange(1000.0).bfloat16())

    def test_a_destination_on_the_host(self, transfer: HostToDeviceTransfer) -> None:
        destination = torch.zeros(1000, dtype=torch.bfloat16)
        transfer.copy(destination, torch.arange(1000.0))
        assert torch.equal(destination, torch.arange(1000.0).bfloat16())

    def test_pinned_bytes_do_not_grow(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        transfer.copy(accelerator.device_empty(10, dtype=torch.bfloat16), torch.zeros(10))
        held = transfer.pinned_bytes
        for numel in (1, 999, 20_000):
            transfer.copy(accelerator.device_empty(numel, dtype=torch.bfloat16), torch.zeros(numel))
            assert transfer.pinned_bytes == held

    def test_close_gives_everything_back(self, accelerator: Accelerator) -> None:
        before = getattr(accelerator, "pinned_bytes", 0)
        transfer = self.make_transfer(accelerator)
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(3000.0))
        transfer.close()
        assert transfer.pinned_bytes == 0
        assert getattr(accelerator, "pinned_bytes", 0) == before
        copy.wait()
        assert torch.equal(destination.cpu(), torch.arange(3000.0).bfloat16())
        transfer.close()

    def test_use_after_close_starts_afresh(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        for value in (1.0, 2.0):
            destination = accelerator.device_empty(1000, dtype=torch.bfloat16)
            transfer.copy(destination, torch.full((1000,), value))
            assert (fetch(accelerator, destination) == value).all()
            transfer.close()

    def test_dropping_a_transfer_in_flight(self, accelerator: Accelerator) -> None:
        before = getattr(accelerator, "pinned_bytes", 0)
        transfer = self.make_transfer(accelerator)
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(3000.0))
        del transfer
        gc.collect()
        assert getattr(accelerator, "pinned_bytes", 0) == before
        copy.wait()
        assert torch.equal(destination.cpu(), torch.arange(3000.0).bfloat16())
