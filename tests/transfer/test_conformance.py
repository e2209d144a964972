"""Every strategy against every accelerator."""

import pytest
import torch

from transfer import PageableTransfer, PinnedDirectTransfer, PinnedStagedTransfer, build_transfer
from transfer.testing import TransferConformance


class OnEveryAccelerator(TransferConformance):
    @pytest.fixture
    def accelerator(self, any_accelerator):
        return any_accelerator


class TestPageable(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PageableTransfer(accelerator=accelerator)


class TestPinnedStaged(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PinnedStagedTransfer(accelerator=accelerator, chunk_elements=256)


class TestPinnedStagedWithOneBuffer(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PinnedStagedTransfer(accelerator=accelerator, chunk_elements=300, buffers=1)


class TestPinnedStagedWithFiveBuffers(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PinnedStagedTransfer(accelerator=accelerator, chunk_elements=127, buffers=5)


class TestPinnedDirectUnprepared(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        config = {"strategy": "pinned_direct", "pinned_staged": {"chunk_elements": 500}}
        return build_transfer(config, accelerator=accelerator)


class PreparesFirst(PinnedDirectTransfer):
    """Page-locks each source, so that the suite's own sources go directly."""

    def submit(self, destination, source):
        lazy = isinstance(source, torch.nn.parameter.UninitializedParameter)
        if (
            isinstance(source, torch.Tensor)
            and source.layout is torch.strided
            and source.device.type == "cpu"
            and not lazy
        ):
            self.prepare(source)
        return super().submit(destination, source)


class TestPinnedDirect(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PreparesFirst(accelerator=accelerator, chunk_elements=256)


class TestPinnedDirectInChunks(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PreparesFirst(accelerator=accelerator, mapped=False, chunk_elements=256)


class TestPinnedDirectInChunksWithOneBuffer(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PreparesFirst(accelerator=accelerator, mapped=False, chunk_elements=300, buffers=1)


class TestPinnedDirectInChunksWithFiveBuffers(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PreparesFirst(accelerator=accelerator, mapped=False, chunk_elements=127, buffers=5)


class TestDefaultPolicy(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return build_transfer({}, accelerator=accelerator)


class TestForcedStrategy(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return build_transfer(
            {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 500}}, accelerator=accelerator
        )
