"""Tests that ask for ``accelerator_name`` run once for every accelerator that is here or required.

Those that ask for ``device_name`` run for each but ``cpu``, which has no memory of its own.
"""

import functools
import gc
import os
import sys
from pathlib import Path

import pytest

from accelerators import available_accelerators
from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import accelerator_or_skip, unavailable_reason
from tests.environment import NO_COMPILER

os.environ.update(NO_COMPILER)  # before anything imports DeepSpeed's engine
gc.disable()  # until all is imported: it would look through modules again and again

pytest.register_assert_rewrite("tests.running", "tests.zero3.launching")  # their checks say what differs

#: Errors while a test runs. In pyproject.toml they would be errors in plug-ins too, such as one of pytest-benchmark
#: while pytest-xdist starts, which ends the whole run.
WARNINGS = ("error", "ignore::DeprecationWarning:deepspeed", "ignore::FutureWarning:deepspeed")


#: What takes longest, in that order, is started first: else one worker waits at the end while the other one does it.
#: The first one alone is on both cores.
LONG_MODULES = (
    "zero3/gradients/test_training.py",
    "zero3/inside/test_training.py",
    "zero3/test_training.py",
    "zero3/swapped/test_interrupted.py",
    "zero3/test_growth.py",
    "cli/test_bench_zero3.py",
    "cli/test_bench_zero3_nvme.py",
    "cli/test_bench_zero3_peers.py",
    "cli/test_demo.py",
    "test_examples.py",
    "zero3/gradients/test_interrupted.py",
    "zero3/test_interfering.py",
)
FIRST = {Path(__file__).parent / name: number for number, name in enumerate(LONG_MODULES)}


def pytest_configure(config):
    """pytest-randomly seeds when it starts, not three times a test: each takes torch 3 ms and memory that it keeps.

    pytest-xdist hands modules out as they were collected, not those with the most tests first.
    """
    if hasattr(config.option, "randomly_reset_seed"):
        config.option.randomly_reset_seed = False
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config, items):
    if "long" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: FIRST.get(item.path, len(FIRST)))
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(*WARNINGS), append=False)  # a test's own come after, and win


def pytest_collection_finish():
    freeze_modules()
    gc.enable()


def pytest_runtest_setup():
    freeze_modules()  # what the test before has imported


frozen = 0


def freeze_modules():
    """Many tests collect garbage, which takes a third of a second where it looks through all modules too."""
    global frozen
    if len(sys.modules) > frozen + 100:
        gc.collect()
        gc.freeze()
        frozen = len(sys.modules)


def pytest_generate_tests(metafunc):
    for fixture in {"accelerator_name", "device_name"} & set(metafunc.fixturenames):
        here = accelerators_here(tuple(metafunc.config.getoption("--require-accelerator")))
        names = [name for name in here if fixture == "accelerator_name" or name != "cpu"]
        metafunc.parametrize(fixture, names, scope="class")


@functools.cache  # asked for every test function; each answer looks through everything that is installed
def accelerators_here(required):
    return [name for name in available_accelerators() if name in required or unavailable_reason(name) is None]


@pytest.fixture
def any_accelerator(accelerator_name, pytestconfig):
    """Each accelerator in turn; a fresh simulated one for every test."""
    if accelerator_name == "simulated":
        return SimulatedAccelerator(seed=11)
    return accelerator_or_skip(accelerator_name, pytestconfig)


@pytest.fixture
def simulated():
    return SimulatedAccelerator(seed=5)
