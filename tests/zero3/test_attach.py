"""attach, detach, install, uninstall and the order of configurations, on a stand-in for ZeRO-3.

The stand-in has the attributes and methods of ``DeepSpeedZeroOptimizer_Stage3`` that the copy-back
uses; the real one is in ``test_training.py``.
"""

import contextlib
import gc
import json
import types
import weakref

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from transfer import (
    AttachError,
    ConfigError,
    HostToDeviceTransfer,
    PageableTransfer,
    TransferError,
    build_transfer,
    zero3,
    zero3_hooks,
)

COPY_BACK = "_reassign_or_swap_out_partitioned_parameters"


class Stage3:
    offload_param = False

    def __init__(self, simulated, sub_groups=2):
        self.fp16_partitioned_groups_flat = [simulated.device_empty(8, dtype=torch.bfloat16) for _ in range(sub_groups)]
        self.fp32_partitioned_groups_flat = [torch.arange(8.0) + index for index in range(sub_groups)]
        self.calls = []

    def _unflatten_partitioned_parameters(self, sub_group_id):
        self.calls.append(("unflatten", sub_group_id))

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
        self.calls.append(("deepspeed", sub_group_id))

    def destroy(self):
        self.calls.append("destroy")


class SuperOffload(Stage3):
    """Overrides the copy-back without calling the class above, as SuperOffload does."""

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
        self.calls.append(("superoffload", sub_group_id))


class Spy(HostToDeviceTransfer):
    def __init__(self, simulated):
        super().__init__(accelerator=simulated)
        self.log = []

    def prepare(self, source):
        self.log.append(("prepare", source.tolist()[0]))

    def copy(self, destination, source):
        self.log.append(("copy", source.tolist()[0]))
        super().copy(destination, source)

    def close(self):
        self.log.append("close")

    def _submit(self, destination, source):
        return PageableTransfer(accelerator=self.accelerator)._submit(destination, source)


def engine_of(optimizer, **deepspeed_config):
    return types.SimpleNamespace(optimizer=optimizer, _config=types.SimpleNamespace(_param_dict=deepspeed_config))


def copy_backs(spy):
    return [entry[1] for entry in spy.log if entry[0] == "copy"]


@pytest.fixture(autouse=True)
def _clean():
    originals = {cls: vars(cls)[COPY_BACK] for cls in (Stage3, SuperOffload)}
    destroy = Stage3.destroy
    yield
    zero3.uninstall()
    for optimizer in list(zero3._attachments):
        zero3.detach(optimizer)
    for cls, original in originals.items():
        assert vars(cls)[COPY_BACK] is original, "a method is still replaced"
    assert Stage3.destroy is destroy


def test_copy_backs_of_an_attached_engine_go_through_the_interface(simulated):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    assert zero3.attach(engine_of(optimizer), spy) is spy
    assert [entry for entry in spy.log if entry[0] == "prepare"] == [("prepare", 0.0), ("prepare", 1.0)]
    optimizer._reassign_or_swap_out_partitioned_parameters(1)
    assert copy_backs(spy) == [1.0]
    assert optimizer.calls == [("unflatten", 1)]
    assert optimizer.fp16_partitioned_groups_flat[1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_only_that_engine(simulated):
    attached, other, spy = Stage3(simulated), Stage3(simulated), Spy(simulated)
    zero3.attach(attached, spy)
    other._reassign_or_swap_out_partitioned_parameters(0)
    assert other.calls == [("deepspeed", 0)]
    assert copy_backs(spy) == []


def test_the_overriding_class_is_served_too(simulated):
    optimizer, spy = SuperOffload(simulated), Spy(simulated)
    zero3.attach(optimizer, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0]
    zero3.detach(optimizer)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("unflatten", 0), ("superoffload", 0)]


def test_attach_and_detach_are_idempotent(simulated):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    engine = engine_of(optimizer)
    original = Stage3._reassign_or_swap_out_partitioned_parameters
    for _ in range(3):
        zero3.attach(engine, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0]
    for _ in range(3):
        zero3.detach(engine)
    assert Stage3._reassign_or_swap_out_partitioned_parameters is original
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls[-1] == ("deepspeed", 0)
    assert "close" not in spy.log[-1:], "the caller's transfer stays the caller's"


def test_another_transfer_replaces_the_first(simulated):
    optimizer, first, second = Stage3(simulated), Spy(simulated), Spy(simulated)
    zero3.attach(optimizer, first)
    zero3.attach(optimizer, second)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert (copy_backs(first), copy_backs(second)) == ([], [0.0])


def test_the_same_configuration_keeps_the_transfer(simulated):
    engine = engine_of(Stage3(simulated))
    config = {"accelerator": "simulated", "strategy": "pageable"}
    first = zero3.attach(engine, config)
    assert zero3.attach(engine, dict(config)) is first
    assert zero3.attach(engine, {**config, "fallback": False}) is not first


@pytest.mark.parametrize(
    "change", ["offload_param", "on nvme", "alias", "master on the device", "partition on the host"]
)
def test_deepspeeds_own_code_runs_where_the_copy_does_not_cross(simulated, change):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    partition = optimizer.fp16_partitioned_groups_flat
    if change == "offload_param":
        optimizer.offload_param = True
    elif change == "on nvme":
        partition[0] = None
    elif change == "alias":
        optimizer.fp32_partitioned_groups_flat[0] = partition[0]
    elif change == "master on the device":
        optimizer.fp32_partitioned_groups_flat[0] = simulated.device_empty(8, dtype=torch.float32)
    else:
        partition[0] = torch.zeros(8, dtype=torch.bfloat16)
    zero3.attach(optimizer, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("deepspeed", 0)]
    assert copy_backs(spy) == []


def test_a_master_that_moves_is_followed(simulated):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    zero3.attach(optimizer, spy)
    on_host = optimizer.fp32_partitioned_groups_flat[0]
    optimizer.fp32_partitioned_groups_flat[0] = simulated.adopt(on_host.clone())
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    optimizer.fp32_partitioned_groups_flat[0] = on_host
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("deepspeed", 0), ("unflatten", 0)]
    assert copy_backs(spy) == [0.0]


def test_empty_partitions(simulated):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    optimizer.fp16_partitioned_groups_flat[0] = simulated.device_empty(0, dtype=torch.bfloat16)
    optimizer.fp32_partitioned_groups_flat[0] = torch.empty(0)
    zero3.attach(optimizer, spy)
    for sub_group_id in range(2):
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group_id)
    assert optimizer.fp16_partitioned_groups_flat[1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_destroying_the_engine_releases_the_buffers_first(simulated):
    optimizer = Stage3(simulated)
    transfer = build_transfer({"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 4}}, simulated)
    zero3.attach(optimizer, transfer)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert simulated.pinned_bytes == 16
    optimizer.destroy()
    assert simulated.pinned_bytes == 0
    assert optimizer.calls[-1] == "destroy"
    assert optimizer not in zero3._attachments
    other, shared = Stage3(simulated), Stage3(simulated)
    zero3.attach(other, transfer)
    zero3.attach(shared, transfer)
    other.destroy()
    shared._reassign_or_swap_out_partitioned_parameters(0)
    assert shared.fp16_partitioned_groups_flat[0].tolist() == list(range(8)), "a shared transfer goes on working"
    shared.destroy()
    assert simulated.pinned_bytes == 0


def test_an_engine_that_is_only_dropped_leaves_nothing(simulated):
    optimizer = Stage3(simulated)
    seen = weakref.ref(optimizer)
    import accelerators

    accelerators.set_accelerator(simulated)
    try:
        zero3.attach(optimizer, {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 4}})
        optimizer._reassign_or_swap_out_partitioned_parameters(0)
        assert simulated.pinned_bytes == 16
        del optimizer
        gc.collect()
        assert seen() is None
        assert simulated.pinned_bytes == 0
    finally:
        accelerators.set_accelerator(None)


def test_a_failing_copy_back_reaches_the_training_loop_and_the_next_works(simulated):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    zero3.attach(optimizer, spy)
    good = optimizer.fp32_partitioned_groups_flat[0]
    optimizer.fp32_partitioned_groups_flat[0] = torch.zeros(3)
    with pytest.raises(TransferError, match="shapes differ"):
        optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == []
    optimizer.fp32_partitioned_groups_flat[0] = good
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("unflatten", 0)]


class ZeroTwo:
    """No ZeRO-3 in sight."""


@pytest.mark.parametrize("engine", [ZeroTwo(), engine_of(ZeroTwo()), None, torch.nn.Linear(1, 1)])
def test_what_does_not_run_zero3_is_refused(engine):
    with pytest.raises(AttachError, match="is not a DeepSpeed 0.16 to 0.19 ZeRO-3 engine"):
        zero3.attach(engine)
    zero3.detach(engine)


def test_framework_wrappers_are_looked_through(simulated):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    wrapped = types.SimpleNamespace(optimizer=types.SimpleNamespace(optimizer=optimizer))
    zero3.attach(wrapped, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0]


def test_somebody_elses_instance_patch_is_not_overwritten(simulated):
    optimizer = Stage3(simulated)
    optimizer._reassign_or_swap_out_partitioned_parameters = lambda sub_group_id: None
    with pytest.raises(AttachError, match="replaced by somebody else"):
        zero3.attach(optimizer, Spy(simulated))


def test_somebody_elses_wrapper_on_top_stays_and_ours_passes_on(simulated, monkeypatch):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    zero3.attach(optimizer, spy)
    ours = Stage3._reassign_or_swap_out_partitioned_parameters
    theirs = lambda self, sub_group_id: ours(self, sub_group_id)  # noqa: E731
    Stage3._reassign_or_swap_out_partitioned_parameters = theirs
    zero3.detach(optimizer)
    assert Stage3._reassign_or_swap_out_partitioned_parameters is theirs
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("deepspeed", 0)]
    zero3.attach(optimizer, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0], "once, not once for each layer"
    Stage3._reassign_or_swap_out_partitioned_parameters = ours
    zero3.detach(optimizer)


def test_a_patch_of_somebody_else_that_is_undone_does_not_lose_ours(simulated, monkeypatch):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    with monkeypatch.context() as patched:
        patched.setattr(Stage3, COPY_BACK, lambda self, sub_group_id: None)
        zero3.attach(optimizer, spy)
    zero3.attach(optimizer, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0]


@pytest.mark.usefixtures("stand_ins")
def test_a_subclass_keeps_its_own_code_around_deepspeeds(simulated):
    class Logging(Stage3):
        def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
            self.calls.append(("logging", sub_group_id))
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    optimizer, spy = Logging(simulated), Spy(simulated)
    zero3.attach(optimizer, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("logging", 0), ("unflatten", 0)]
    assert copy_backs(spy) == [0.0]


def test_a_failing_prepare_attaches_nothing(simulated):
    class Refuses(Spy):
        def prepare(self, source):
            raise MemoryError("cannot page-lock")

    optimizer = Stage3(simulated)
    with pytest.raises(MemoryError):
        zero3.attach(optimizer, Refuses(simulated))
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("deepspeed", 0)]


def test_an_accelerator_that_is_not_there_attaches_nothing(simulated):
    optimizer = Stage3(simulated)
    simulated.unavailable_reason = lambda: "No Acme card was found."
    with pytest.raises(TransferError, match="No Acme card"):
        zero3.attach(optimizer, build_transfer({}, simulated))
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("deepspeed", 0)]


def test_an_engine_without_anything_to_copy_is_told_of(simulated, caplog):
    optimizer = Stage3(simulated)
    optimizer.offload_param = True
    zero3.attach(optimizer, Spy(simulated))
    assert "none of the 2 sub-groups of this ZeRO-3 engine has its master partition on the host" in caplog.text


@pytest.mark.usefixtures("stand_ins", "engine")
def test_uninstall_goes_on_after_a_close_that_fails(simulated, monkeypatch):
    zero3.install({"strategy": "pageable"})
    engines = [Engine(simulated) for _ in range(3)]
    failed = zero3._attachments[engines[1].optimizer].transfer
    monkeypatch.setattr(failed, "close", lambda: (_ for _ in ()).throw(RuntimeError("lost device")))
    with pytest.raises(RuntimeError, match="lost device"):
        zero3.uninstall()
    for made in engines:
        made.optimizer._reassign_or_swap_out_partitioned_parameters(0)
        assert made.optimizer.calls == [("deepspeed", 0)]
    assert not zero3_hooks.active


def test_a_mistake_in_the_environments_file_is_found_by_install(tmp_path, monkeypatch):
    path = tmp_path / "h2d.yaml"
    path.write_text("transfer: {strategi: pageable}")
    monkeypatch.setenv("H2D_CONFIG", str(path))
    with pytest.raises(ConfigError, match="unknown key 'strategi'"):
        zero3.install()
    assert zero3._installed is None


# Where the configuration comes from.


@pytest.fixture
def environment(tmp_path, monkeypatch):
    path = tmp_path / "environment.yaml"
    path.write_text("transfer: {strategy: pinned_staged, pinned_staged: {chunk_elements: 2}}")
    monkeypatch.setenv("H2D_CONFIG", str(path))


SECTION = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}


def chunk(transfer):
    return transfer.policy.config.section("pinned_staged").chunk_elements


@pytest.fixture
def engine(simulated, monkeypatch):
    import accelerators

    accelerators.set_accelerator(simulated)
    yield engine_of(Stage3(simulated), host_to_device_transfer=SECTION, zero_optimization={"stage": 3})
    accelerators.set_accelerator(None)


def test_the_argument_wins(engine, environment):
    assert chunk(zero3.attach(engine, {"pinned_staged": {"chunk_elements": 1}})) == 1


def test_then_the_environment(engine, environment, caplog):
    assert chunk(zero3.attach(engine)) == 2
    assert "$H2D_CONFIG overrides host_to_device_transfer of the DeepSpeed config" in caplog.text


def test_then_the_deepspeed_config(engine):
    assert chunk(zero3.attach(engine)) == 3


def test_then_the_defaults(simulated, engine):
    assert chunk(zero3.attach(engine_of(Stage3(simulated)))) == 2**24


def test_the_section_may_be_a_path(simulated, engine, tmp_path):
    path = tmp_path / "h2d.yaml"
    path.write_text("transfer: {pinned_staged: {chunk_elements: 5}}")
    assert chunk(zero3.attach(engine_of(Stage3(simulated), host_to_device_transfer=str(path)))) == 5


@pytest.mark.parametrize(
    ("deepspeed_config", "message"),
    [
        (
            {"host_to_device_transfer": {"pinned_staged": {"chunk": 3}}},
            r"host_to_device_transfer\.pinned_staged\.chunk: unknown key 'chunk'",
        ),
        ({"host_to_device_transfer": 3}, r"host_to_device_transfer: found 3 \(int\): expected a mapping, or the path"),
        ({"host_to_device_transfer": {"strategy": "auto"}}, "Leave the key out for the default"),
        ({"host_to_device_tranfer": {}}, "host_to_device_tranfer: .* did you mean 'host_to_device_transfer'"),
        ({"host_to_device_transfers": {}}, "did you mean 'host_to_device_transfer'"),
        ({"h2d": {}}, "did you mean 'host_to_device_transfer'"),
        ({"transfer": {}}, "did you mean 'host_to_device_transfer'"),
    ],
)
def test_mistakes_in_the_deepspeed_config_leave_the_engine_alone(simulated, engine, deepspeed_config, message):
    optimizer = Stage3(simulated)
    with pytest.raises(ConfigError, match=message):
        zero3.attach(engine_of(optimizer, **deepspeed_config))
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls == [("deepspeed", 0)]


def test_a_refused_install_installs_nothing():
    with pytest.raises(ConfigError):
        zero3.install({"strategy": "no such thing"})
    assert zero3._installed is None
    assert not zero3_hooks.active


def test_install_hooks_deepspeeds_classes_and_uninstall_restores_them():
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    classes = [DeepSpeedZeroOptimizer_Stage3]
    with contextlib.suppress(ImportError):  # since 0.18
        from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

        classes.append(SuperOffloadOptimizer_Stage3)

    def methods():
        return [
            vars(DeepSpeedEngine)["_configure_zero_optimizer"],
            *(vars(cls)[COPY_BACK] for cls in classes),
            vars(DeepSpeedZeroOptimizer_Stage3)["destroy"],
        ]

    before = methods()
    zero3.install({"strategy": "pageable"})
    zero3.install({"strategy": "pageable"})
    assert all(now is not then for now, then in zip(methods(), before, strict=True))
    zero3.uninstall()
    zero3.uninstall()
    assert methods() == before


class Engine:
    """What ``install`` hooks of DeepSpeedEngine."""

    def __init__(self, simulated, **deepspeed_config):
        self._config = types.SimpleNamespace(_param_dict=deepspeed_config)
        self.built = 0
        self.simulated = simulated
        self.optimizer = self._configure_zero_optimizer(None)

    def _configure_zero_optimizer(self, optimizer):
        self.built += 1
        return Stage3(self.simulated)


@pytest.fixture
def stand_ins(monkeypatch):
    """Lets ``install`` find the stand-ins in place of DeepSpeed's classes."""
    import deepspeed.runtime.engine

    monkeypatch.setattr(deepspeed.runtime.engine, "DeepSpeedEngine", Engine)
    monkeypatch.setattr(zero3_hooks, "zero3_classes", lambda: [Stage3, SuperOffload])


@pytest.mark.usefixtures("stand_ins", "engine")
def test_engines_made_after_install_are_attached_with_their_own_configuration(simulated):
    zero3.install()
    made = Engine(simulated, host_to_device_transfer=SECTION)
    assert chunk(zero3._attachments[made.optimizer].transfer) == 3
    made.optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert made.optimizer.calls == [("unflatten", 0)]
    assert simulated.pinned_bytes == 12
    zero3.uninstall()
    assert simulated.pinned_bytes == 0
    made.optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert made.optimizer.calls[-1] == ("deepspeed", 0)


@pytest.mark.usefixtures("stand_ins", "engine")
def test_engines_made_before_install_are_attached_at_their_next_copy_back(simulated):
    old = Stage3(simulated)
    zero3.install({"strategy": "pageable"})
    old._reassign_or_swap_out_partitioned_parameters(0)
    assert old.calls == [("unflatten", 0)]
    zero3.detach(old)
    old._reassign_or_swap_out_partitioned_parameters(0)
    assert old.calls[-1] == ("deepspeed", 0), "a detached engine stays detached"
    zero3.attach(old, {"strategy": "pageable"})
    old._reassign_or_swap_out_partitioned_parameters(0)
    assert old.calls[-1] == ("unflatten", 0)


@pytest.mark.usefixtures("stand_ins", "engine")
def test_uninstall_leaves_what_attach_was_called_for(simulated):
    zero3.install({"strategy": "pageable"})
    optimizer, spy = Stage3(simulated), Spy(simulated)
    zero3.attach(optimizer, spy)
    zero3.uninstall()
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0]


@pytest.mark.usefixtures("stand_ins")
def test_a_mistake_in_the_section_stops_the_engine_before_the_optimizer_is_built(simulated):
    zero3.install()
    with pytest.raises(ConfigError, match="host_to_device_transfer.fallback"):
        Engine(simulated, host_to_device_transfer=json.loads('{"fallback": "no"}'))


def test_a_shared_simulated_accelerator_sees_every_pin_go(simulated):
    assert isinstance(simulated, SimulatedAccelerator)
    optimizer = Stage3(simulated, sub_groups=3)
    with build_transfer({"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}, simulated) as transfer:
        zero3.attach(optimizer, transfer)
        for sub_group_id in range(3):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group_id)
            got = optimizer.fp16_partitioned_groups_flat[sub_group_id].tolist()
            assert got == [value + sub_group_id for value in range(8)]
        zero3.detach(optimizer)
    assert simulated.pinned_bytes == 0
