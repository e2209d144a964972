"""Every accelerator that is here, against the shipped suite; those that are not, with the reason."""

import pytest

from accelerators import available_accelerators
from accelerators.testing import AcceleratorConformance, accelerator_or_skip


class TestEveryAccelerator(AcceleratorConformance):
    @pytest.fixture
    def accelerator(self, any_accelerator, accelerator_name):
        self.accelerator_name = accelerator_name
        return any_accelerator


@pytest.mark.parametrize("name", available_accelerators())
def test_available(name, pytestconfig):
    assert accelerator_or_skip(name, pytestconfig).unavailable_reason() is None
