"""Every strategy against every accelerator."""

import contextlib
import typing

import pytest
import torch

from transfer import NvmeSwappedTransfer, PageableTransfer, PinnedDirectTransfer, PinnedStagedTransfer, build_transfer
from transfer.errors import TransferError
from transfer.nvme import swap_out
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


def is_plain(source):
    """Whether it is a tensor that answers questions about its memory."""
    lazy = isinstance(source, torch.nn.parameter.UninitializedParameter)
    return isinstance(source, torch.Tensor) and source.layout is torch.strided and not lazy


class PreparesFirst(PinnedDirectTransfer):
    """Page-locks each source, so that the suite's own sources go directly."""

    def submit(self, destination, source):
        if is_plain(source) and source.device.type == "cpu":
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


class SwapsOutFirst(NvmeSwappedTransfer):
    """Writes each source to a file and copies from there, so that the suite's own sources are read from files."""

    def submit(self, destination, source):
        if is_plain(source) and not self.accelerator.on_device(source):
            with contextlib.suppress(TransferError):  # what is refused, `submit` refuses too
                source = swap_out(source, self.config.path, checksum_bytes=4096)
        return super().submit(destination, source)


class OnFiles(OnEveryAccelerator):
    options: typing.ClassVar = {}

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.directory = tmp_path

    def make_transfer(self, accelerator):
        options = {"chunk_elements": 2048, "threads": 2, **self.options}
        return SwapsOutFirst(accelerator=accelerator, path=str(self.directory), **options)


class TestNvmeSwapped(OnFiles):
    pass


class TestNvmeSwappedCastOnTheHost(OnFiles):
    options: typing.ClassVar = {"cast": "host"}


class TestNvmeSwappedWithOneBuffer(OnFiles):
    options: typing.ClassVar = {"buffers": 1, "threads": 1}


class TestNvmeSwappedUnchecked(OnFiles):
    options: typing.ClassVar = {"buffers": 5, "checksums": False, "request_bytes": 4096}


class TestDefaultPolicy(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return build_transfer({}, accelerator=accelerator)


class TestForcedStrategy(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return build_transfer(
            {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 500}}, accelerator=accelerator
        )
