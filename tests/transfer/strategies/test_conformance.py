"""Every strategy against the accelerators that it can serve."""

import os
import typing
import warnings

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import accelerator_or_skip
from transfer import (
    FallbackWarning,
    NvmeSwappedTransfer,
    PageableTransfer,
    PinnedDirectTransfer,
    PinnedStagedTransfer,
    build_transfer,
)
from transfer.errors import TransferError
from transfer.nvme import swap_out
from transfer.testing import CleanFailures, Lifetimes, SameBits, TransferConformance
from transfer.validation import validate

SMALL_CHUNKS = {"pinned_staged": {"chunk_elements": 300}, "pinned_direct": {"chunk_elements": 300}}


class OnEveryAccelerator(TransferConformance):
    """For strategies that have something of their own to do on each of them."""

    @pytest.fixture
    def accelerator(self, any_accelerator):
        return any_accelerator


class OnDevices:
    """Not on ``cpu``, where no strategy but the file's has anything to do: ``test_on_cpu.py``."""

    several_chunks = 703

    @pytest.fixture
    def accelerator(self, device_name, pytestconfig):
        if device_name == "simulated":
            return SimulatedAccelerator(seed=11)
        return accelerator_or_skip(device_name, pytestconfig)


class Buffers(OnDevices, SameBits, Lifetimes, CleanFailures):
    """What the number of buffers may change."""

    pytestmark = pytest.mark.slow
    test_more_than_a_mebibyte = None  # thousands of small chunks, which say nothing more here


class TestPageable(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return PageableTransfer(accelerator=accelerator)


class TestPinnedStaged(OnDevices, TransferConformance):
    def make_transfer(self, accelerator):
        return PinnedStagedTransfer(accelerator=accelerator, chunk_elements=256)


class TestPinnedStagedWithOneBuffer(Buffers):
    def make_transfer(self, accelerator):
        return PinnedStagedTransfer(accelerator=accelerator, chunk_elements=300, buffers=1)


class TestPinnedStagedWithFiveBuffers(Buffers):
    def make_transfer(self, accelerator):
        return PinnedStagedTransfer(accelerator=accelerator, chunk_elements=127, buffers=5)


class PreparesFirst(PinnedDirectTransfer):
    """Page-locks each source, so that the suite's own sources go directly."""

    def submit(self, destination, source):
        if is_copyable(destination, source) and source.device.type == "cpu":
            self.prepare(source)
        return super().submit(destination, source)


class TestPinnedDirect(OnDevices, TransferConformance):
    def make_transfer(self, accelerator):
        return PreparesFirst(accelerator=accelerator, chunk_elements=256)


class TestPinnedDirectInChunks(OnDevices, TransferConformance):
    def make_transfer(self, accelerator):
        return PreparesFirst(accelerator=accelerator, mapped=False, chunk_elements=256)

    def test_more_than_a_mebibyte(self, accelerator, transfer):
        """In tens of chunks: thousands take seconds."""
        with PreparesFirst(accelerator=accelerator, mapped=False, chunk_elements=10_000) as larger:
            super().test_more_than_a_mebibyte(accelerator, larger)


class TestPinnedDirectInChunksWithOneBuffer(Buffers):
    def make_transfer(self, accelerator):
        return PreparesFirst(accelerator=accelerator, mapped=False, chunk_elements=300, buffers=1)


class TestPinnedDirectInChunksWithFiveBuffers(Buffers):
    def make_transfer(self, accelerator):
        return PreparesFirst(accelerator=accelerator, mapped=False, chunk_elements=127, buffers=5)


class SwapsOutFirst(NvmeSwappedTransfer):
    """Writes each source to a file and copies from there, so that the suite's own sources are read from files."""

    files: typing.ClassVar = {}

    def submit(self, destination, source):
        if is_copyable(destination, source) and self.accelerator.on_host(source):
            source = self.file_of(source)
        return super().submit(destination, source)

    def file_of(self, source):
        """A file with these values: one that was written before, if there is one."""
        values = source.detach().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        key = self.config.path, source.dtype, source.shape, values
        if key not in self.files:
            self.files[key] = swap_out(source, self.config.path, checksum_bytes=4096)
        return self.files[key]


class OnFiles:
    options: typing.ClassVar = {}
    several_chunks = 2507  # elements of fp32 in chunks of 1024

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path, monkeypatch):
        self.directory = tmp_path
        # What survives a power failure is not the subject.
        monkeypatch.setattr(os, "fsync", lambda _: None)
        monkeypatch.setattr(SwapsOutFirst, "files", {})

    def make_transfer(self, accelerator):
        options = {"chunk_elements": 1024, "buffers": 2, "threads": 2, **self.options}
        return SwapsOutFirst(accelerator=accelerator, path=str(self.directory), **options)


@pytest.mark.slow
class TestNvmeSwapped(OnFiles, OnEveryAccelerator):
    pass


@pytest.mark.slow
class TestNvmeSwappedCastOnTheHost(OnFiles, OnDevices, TransferConformance):
    options: typing.ClassVar = {"cast": "host"}


class TestNvmeSwappedWithOneBuffer(OnFiles, Buffers):
    options: typing.ClassVar = {"buffers": 1, "threads": 1}


class TestNvmeSwappedUnchecked(OnFiles, Buffers):
    options: typing.ClassVar = {"buffers": 3, "checksums": False, "request_bytes": 4096}
    several_chunks = 3503


class TestDefaultPolicy(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return build_transfer(SMALL_CHUNKS, accelerator=accelerator)


@pytest.mark.slow
class TestForcedStrategy(OnDevices, TransferConformance):
    def make_transfer(self, accelerator):
        return build_transfer({"strategy": "pinned_staged", **SMALL_CHUNKS}, accelerator=accelerator)


@pytest.mark.slow
class TestForcedStrategyThatNothingIsPreparedFor(OnDevices, TransferConformance):
    @pytest.fixture(autouse=True)
    def _no_fallback(self):
        """A strategy that was asked for and cannot make a copy is replaced after a warning."""
        warnings.filterwarnings("ignore", category=FallbackWarning)

    def make_transfer(self, accelerator):
        return build_transfer({"strategy": "pinned_direct", **SMALL_CHUNKS}, accelerator=accelerator)


class TestVerifiedBySamples(OnEveryAccelerator):
    def make_transfer(self, accelerator):
        return build_transfer({"verify": "sample", **SMALL_CHUNKS}, accelerator=accelerator)


class TestVerifiedInFull(Buffers):
    def make_transfer(self, accelerator):
        return build_transfer({"verify": "full", **SMALL_CHUNKS}, accelerator=accelerator)


def is_copyable(destination, source):
    """Whether ``submit`` would accept the two, and has anything to do; the suite gives it others too."""
    try:
        return isinstance(source, torch.Tensor) and validate(destination, source)
    except TransferError:
        return False
