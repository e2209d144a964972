"""Source lifetime, and release of pinned memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from accelerators import Accelerator
from accelerators.testing import skip_without

from ..interface import HostToDeviceTransfer
from ._hooks import GUARD, Hooks, as_it_is_and_cast, check_copy, described, each_kind_of_source, host_source, read


class Lifetimes(Hooks):
    """Contract, points 3 and 4."""

    @pytest.fixture
    def _collects_quickly(self) -> Iterator[None]:
        """Keeps everything that was made before the test out of garbage collections, or what a caller has frozen."""
        if gc.get_freeze_count() > 0:
            yield
            return
        gc.freeze()
        yield
        gc.unfreeze()

    @each_kind_of_source
    @as_it_is_and_cast
    def test_the_source_is_free_after_release_source(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, kind: str, dtype: torch.dtype
    ) -> None:
        values = torch.arange(float(self.several_chunks))
        destination = accelerator.device_empty(self.several_chunks, dtype=dtype)
        with host_source(accelerator, transfer, values, kind) as source:
            copy = transfer.submit(destination, source)
            copy.release_source()
            source.fill_(GUARD)
            copy.wait()
            check_copy(accelerator, destination, values.to(dtype), described(kind, dtype))

    @pytest.mark.usefixtures("_collects_quickly")
    @pytest.mark.parametrize("prepared", [False, True])
    def test_sources_dropped_at_once(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, prepared: bool
    ) -> None:
        if prepared:
            skip_without(accelerator, "registers_host_memory")
        copies = []
        for seed in range(3):
            destination = accelerator.device_empty(1, dtype=torch.float32)
            values = torch.randn(1, generator=torch.Generator().manual_seed(seed))
            if prepared:
                transfer.prepare(values)
            copies.append((transfer.submit(destination, values), destination))
        del values
        gc.collect()
        for copy, _ in copies:
            copy.wait()
        got = [round(read(accelerator, destination).item(), 4) for _, destination in copies]
        assert got == [1.5410, 0.6614, 0.3923]

    def test_a_source_on_the_device(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        source = accelerator.device_empty(1000, dtype=torch.float32)
        source.copy_(torch.arange(1000.0))
        destination = accelerator.device_empty(1000, dtype=torch.bfloat16)
        transfer.copy(destination, source)
        check_copy(accelerator, destination, torch.arange(1000.0).bfloat16(), "a source on the device")

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

    @each_kind_of_source
    @as_it_is_and_cast
    def test_close_gives_everything_back(self, accelerator: Accelerator, kind: str, dtype: torch.dtype) -> None:
        before = getattr(accelerator, "pinned_bytes", 0)
        transfer = self.make_transfer(accelerator)
        values = torch.arange(float(self.several_chunks))
        destination = accelerator.device_empty(self.several_chunks, dtype=dtype)
        with host_source(accelerator, transfer, values, kind) as source:
            copy = transfer.submit(destination, source)
            transfer.close()
            assert transfer.pinned_bytes == 0
            copy.wait()
            check_copy(accelerator, destination, values.to(dtype), described(kind, dtype))
            transfer.close()
        assert getattr(accelerator, "pinned_bytes", 0) == before

    def test_use_after_close_starts_afresh(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        for value in (1.0, 2.0):
            destination = accelerator.device_empty(1000, dtype=torch.bfloat16)
            transfer.copy(destination, torch.full((1000,), value))
            assert (read(accelerator, destination) == value).all()
            transfer.close()

    @pytest.mark.usefixtures("_collects_quickly")
    @each_kind_of_source
    @as_it_is_and_cast
    def test_dropping_a_transfer_in_flight(self, accelerator: Accelerator, kind: str, dtype: torch.dtype) -> None:
        before = getattr(accelerator, "pinned_bytes", 0)
        transfer = self.make_transfer(accelerator)
        values = torch.arange(float(self.several_chunks))
        destination = accelerator.device_empty(self.several_chunks, dtype=dtype)
        with host_source(accelerator, transfer, values, kind) as source:
            given = source.nbytes if kind == "pinned" else 0
            copy = transfer.submit(destination, source)
            del transfer
            gc.collect()
            if hasattr(accelerator, "pinned_bytes"):
                assert accelerator.pinned_bytes == before + given
            copy.wait()
            check_copy(accelerator, destination, values.to(dtype), described(kind, dtype))
