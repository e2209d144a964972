"""Tests that ask for ``accelerator_name`` run once for every accelerator that is here or required."""

import pytest

from accelerators import available_accelerators
from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import accelerator_or_skip, unavailable_reason


def pytest_generate_tests(metafunc):
    if "accelerator_name" in metafunc.fixturenames:
        required = metafunc.config.getoption("--require-accelerator")
        here = [name for name in available_accelerators() if name in required or unavailable_reason(name) is None]
        metafunc.parametrize("accelerator_name", here, scope="class")


@pytest.fixture
def any_accelerator(accelerator_name, pytestconfig):
    """Each accelerator in turn; a fresh simulated one for every test."""
    if accelerator_name == "simulated":
        return SimulatedAccelerator(seed=11)
    return accelerator_or_skip(accelerator_name, pytestconfig)


@pytest.fixture
def simulated():
    return SimulatedAccelerator(seed=5)
