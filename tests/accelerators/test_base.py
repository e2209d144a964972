"""An accelerator of two methods, against the suites: ``BaseAccelerator`` leaves a vendor no more than that."""

import weakref

import pytest
import torch

from accelerators import BaseAccelerator, Capabilities
from accelerators.testing import AcceleratorConformance
from transfer import TransferPolicy, build_transfer
from transfer.testing import TransferConformance


class Plain(BaseAccelerator):
    """Host memory that was asked for poses as the device's."""

    name = "plain"

    def __init__(self):
        self._storages = weakref.WeakValueDictionary()

    def on_device(self, tensor):
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._storages

    def device_empty(self, *size, dtype):
        tensor = torch.empty(size, dtype=dtype)
        self._storages[tensor.data_ptr()] = tensor.untyped_storage()
        return tensor


class TestPlain(AcceleratorConformance):
    accelerator_name = "plain"

    def make_accelerator(self, config):
        return Plain()


class TestPolicyOnPlain(TransferConformance):
    def make_accelerator(self, config):
        return Plain()

    def make_transfer(self, accelerator):
        return build_transfer({}, accelerator=accelerator)


def test_it_copies_with_the_strategy_that_needs_nothing():
    accelerator = Plain()
    destination, source = accelerator.device_empty(2**20, dtype=torch.bfloat16), torch.randn(2**20)
    with build_transfer({}, accelerator) as transfer:
        decision = TransferPolicy({}, accelerator).select(destination, source)
        transfer.prepare(source)
        transfer.copy(destination, source)
    assert torch.equal(destination, source.bfloat16())
    assert decision.strategy == "pageable"
    assert decision.reason == "This accelerator has no streams."
    assert not accelerator.is_pinned(accelerator.pin_empty(1, dtype=torch.float32))


def test_it_says_what_it_can_do():
    assert repr(Plain()) == "<Plain 'plain': copies that block>"

    class Faster(Plain):
        capabilities = Capabilities(True, True, True, False, True)

    assert repr(Faster()) == "<Faster 'plain': streams, events, pins host memory, copies asynchronously>"


def test_two_methods_are_a_vendors():
    with pytest.raises(TypeError, match="abstract"):
        type("Nothing", (BaseAccelerator,), {"name": "nothing"})()
