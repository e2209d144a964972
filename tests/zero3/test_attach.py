"""attach and detach, on a stand-in for ZeRO-3."""

import gc
import types
import weakref

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from tests.zero3.stand_ins import COPY_BACK, SECTION, Spy, Stage3, SuperOffload, chunk, copy_backs, engine_of
from transfer import AttachError, TransferError, build_transfer, zero3
from transfer.testing.refusals import Wrapped
from transfer.zero3.attachments import attachments


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


def test_nothing_is_pinned_where_nothing_is_offloaded(simulated):
    """As with ``ratio: 0.0``: every master is on the device."""
    optimizer = Stage3(simulated, sub_groups=10)
    masters = optimizer.fp32_partitioned_groups_flat
    masters[:] = [simulated.adopt(master.clone()) for master in masters]
    transfer = build_transfer({"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}, simulated)
    zero3.attach(optimizer, transfer)
    for sub_group_id in range(10):
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group_id)
    assert optimizer.calls == [("deepspeed", sub_group_id) for sub_group_id in range(10)]
    assert simulated.pinned_bytes == 0


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
    assert attachments.get(optimizer) is None
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


def test_attaching_what_attach_built_keeps_it_attachs(simulated, engine):
    built = zero3.attach(engine)
    assert zero3.attach(engine, built) is built
    engine.optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert simulated.pinned_bytes == 12
    zero3.detach(engine)
    assert simulated.pinned_bytes == 0


def test_patches_are_undone_through_any_sequence_of_other_patches(simulated):
    original = vars(Stage3)[COPY_BACK]
    first, second = Stage3(simulated), Stage3(simulated)
    zero3.attach(first, Spy(simulated))
    ours = vars(Stage3)[COPY_BACK]
    setattr(Stage3, COPY_BACK, lambda self, sub_group_id: None)
    zero3.attach(second, Spy(simulated))
    setattr(Stage3, COPY_BACK, ours)
    zero3.attach(first, Spy(simulated))
    zero3.detach(first)
    zero3.detach(second)
    assert vars(Stage3)[COPY_BACK] is original


def test_a_wrapper_with_an_unassigned_variable_is_no_obstacle(simulated, monkeypatch):
    def wrap():
        def wrapper(self, sub_group_id):
            return later(self, sub_group_id)

        monkeypatch.setattr(Stage3, COPY_BACK, wrapper)
        zero3.attach(optimizer, spy)
        later = original

    original = vars(Stage3)[COPY_BACK]
    optimizer, spy = Stage3(simulated), Spy(simulated)
    wrap()
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0]
    zero3.detach(optimizer)


def test_framework_wrappers_are_looked_through(simulated):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    wrapped = types.SimpleNamespace(optimizer=types.SimpleNamespace(optimizer=optimizer))
    zero3.attach(wrapped, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0]


class Wrapper:
    """What a framework gives in place of an engine."""

    def __init__(self, name, inner):
        setattr(self, name, inner)


class RaisesBeforeSetup:
    """A framework's object with a property that is not ready yet."""

    def __init__(self, engine):
        self.engine = engine

    @property
    def optimizer(self):
        raise RuntimeError("call setup() first")


@pytest.mark.parametrize("name", ["optimizer", "engine", "module", "deepspeed_engine", "deepspeed_engine_wrapped"])
@pytest.mark.parametrize("depth", [1, 2])
def test_wrappers_of_engines_are_looked_through(simulated, name, depth):
    """Accelerate's have `.engine`, those of torch `.module`, Lightning's strategy `.deepspeed_engine`."""
    optimizer, spy = Stage3(simulated), Spy(simulated)
    wrapped = engine_of(optimizer)
    for _ in range(depth):
        wrapped = Wrapper(name, wrapped)
    zero3.attach(wrapped, spy)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert copy_backs(spy) == [0.0]
    zero3.detach(wrapped)
    optimizer._reassign_or_swap_out_partitioned_parameters(0)
    assert optimizer.calls[-1] == ("deepspeed", 0)


@pytest.mark.usefixtures("engine")
def test_a_wrappers_engine_brings_its_own_configuration(simulated):
    made_with = engine_of(Stage3(simulated), host_to_device_transfer=SECTION)
    assert chunk(zero3.attach(RaisesBeforeSetup(Wrapper("module", made_with)))) == 3


def test_what_holds_no_engine_is_told_what_to_pass(simulated):
    with pytest.raises(AttachError, match="pass what deepspeed.initialize returned"):
        zero3.attach(Wrapper("model", engine_of(Stage3(simulated))))
    engine = {"monitor": None, "global_samples": 0, "module": engine_of(Stage3(simulated))}
    wrong_stage = types.SimpleNamespace(optimizer=ZeroTwo(), **engine)
    with pytest.raises(AttachError, match=r"its optimizer is ZeroTwo; set `zero_optimization.stage` to 3"):
        zero3.attach(Wrapper("engine", wrong_stage))


def test_partitions_without_memory_of_their_own_are_deepspeeds(simulated):
    optimizer, spy = Stage3(simulated), Spy(simulated)
    optimizer.fp32_partitioned_groups_flat[0] = Wrapped(torch.arange(8.0))
    zero3.attach(optimizer, spy)
    for sub_group_id in range(2):
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group_id)
    assert optimizer.calls == [("deepspeed", 0), ("unflatten", 1)]


def test_an_instance_patch_of_other_code_is_not_overwritten(simulated):
    optimizer = Stage3(simulated)
    optimizer._reassign_or_swap_out_partitioned_parameters = lambda sub_group_id: None
    with pytest.raises(AttachError, match="replaced by other code"):
        zero3.attach(optimizer, Spy(simulated))


def test_a_wrapper_of_other_code_stays_and_ours_passes_on(simulated, monkeypatch):
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


def test_a_patch_of_other_code_that_is_undone_does_not_lose_ours(simulated, monkeypatch):
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
    caplog.clear()
    for change in ({"offload_optimizer": False}, {"swap_optimizer": True}):
        quiet = Stage3(simulated)
        vars(quiet).update(offload_param=True, **change)
        zero3.attach(quiet, Spy(simulated))
    assert not caplog.text


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
