"""Every strategy against every accelerator."""

import pytest

from transfer import PageableTransfer, PinnedStagedTransfer, build_transfer
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


class TestDefaultPolicy(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return build_transfer({}, accelerator=accelerator)


class TestForcedStrategy(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return build_transfer(
            {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 500}}, accelerator=accelerator
        )
