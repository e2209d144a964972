"""Fixtures around the stand-ins, and CPU Adam."""

import pytest

from tests.zero3 import cpu_adam_build
from tests.zero3.stand_ins import COPY_BACK, SECTION, Engine, Stage3, SuperOffload, engine_of
from tests.zero3.swapping import SwappingStage3
from transfer import zero3
from transfer.zero3 import known_code, stage3
from transfer.zero3.attachments import attachments


def pytest_collection_modifyitems(items):
    """A test's own time begins when CPU Adam has been compiled, and real training has been launched."""
    for item in items:
        if "why_no_cpu_adam" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(func_only=True))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def why_no_cpu_adam():
    """Why CPU Adam cannot be compiled here, or None; compiles it."""
    return cpu_adam_build.why_no_cpu_adam()


@pytest.fixture(scope="session")
def cpu_adam(why_no_cpu_adam):
    """DeepSpeed's CPU Adam."""
    if why_no_cpu_adam is not None:
        pytest.skip(why_no_cpu_adam)
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    cpu_adam_build.ask_the_cpu_once()
    CPUAdamBuilder().load(verbose=False)  # it looks for compilers once in each process, which takes seconds
    return DeepSpeedCPUAdam


@pytest.fixture(autouse=True)
def _stand_ins_are_deepspeeds(monkeypatch):
    """Code of the stand-ins counts as DeepSpeed's; that of the tests does not."""
    monkeypatch.setattr(known_code, "PACKAGES", known_code.PACKAGES | {Stage3.__module__, SwappingStage3.__module__})


@pytest.fixture(autouse=True)
def _clean():
    originals = {cls: vars(cls)[COPY_BACK] for cls in (Stage3, SuperOffload)}
    destroy = Stage3.destroy
    yield
    zero3.uninstall()
    for optimizer in list(attachments._by_optimizer):
        zero3.detach(optimizer)
    for cls, original in originals.items():
        assert vars(cls)[COPY_BACK] is original, "a method is still replaced"
    assert Stage3.destroy is destroy


@pytest.fixture
def environment(tmp_path, monkeypatch):
    path = tmp_path / "environment.yaml"
    path.write_text("transfer: {strategy: pinned_staged, pinned_staged: {chunk_elements: 2}}")
    monkeypatch.setenv("H2D_CONFIG", str(path))


@pytest.fixture
def engine(simulated, monkeypatch):
    import accelerators

    accelerators.set_accelerator(simulated)
    yield engine_of(Stage3(simulated), host_to_device_transfer=SECTION, zero_optimization={"stage": 3})
    accelerators.set_accelerator(None)


@pytest.fixture
def stand_ins(monkeypatch):
    """Lets ``install`` find the stand-ins in place of DeepSpeed's classes."""
    import deepspeed.runtime.engine

    monkeypatch.setattr(deepspeed.runtime.engine, "DeepSpeedEngine", Engine)
    monkeypatch.setattr(stage3, "optimizer_classes", lambda: [Stage3, SuperOffload])
