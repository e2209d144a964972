"""The vendor's whole test file: both conformance suites against the new accelerator."""

from acme_accelerator import AcmeAccelerator

from accelerators.testing import AcceleratorConformance
from transfer import PinnedStagedTransfer, build_transfer
from transfer.testing import TransferConformance


class TestAcme(AcceleratorConformance):
    accelerator_name = "acme"

    def make_accelerator(self, config):
        return AcmeAccelerator()


class TestStagingOnAcme(TransferConformance):
    def make_accelerator(self, config):
        return AcmeAccelerator()

    def make_transfer(self, accelerator):
        return PinnedStagedTransfer(accelerator=accelerator, chunk_elements=256)


class TestPolicyOnAcme(TransferConformance):
    def make_accelerator(self, config):
        return AcmeAccelerator()

    def make_transfer(self, accelerator):
        return build_transfer({}, accelerator=accelerator)
