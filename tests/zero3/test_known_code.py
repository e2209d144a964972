"""Which code lets copies run on behind the rest of a step: on a stand-in, whose own code counts as DeepSpeed's."""

import contextlib
import functools
import importlib
import logging
import sys
import types
from unittest import mock

import deepspeed
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zero3.stand_ins import SteppingStage3
from tests.zero3.test_deferred import BEFORE, DIRECT, after
from transfer import build_transfer, zero3
from transfer.zero3.known_code import unknown_in


@pytest.fixture
def optimizer(simulated):
    made = SteppingStage3(simulated, sub_groups=3)
    made.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return made


@pytest.fixture
def attached(simulated, optimizer, caplog):
    caplog.set_level(logging.INFO, "transfer")
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    return optimizer


def lets_copies_run_on(optimizer):
    """Whether they do in a step; either way, the values are right."""
    steps = len(optimizer.seen_at_update) // 3 + 1
    optimizer.step()
    assert optimizer.seen_at_gather == [after(each, steps) for each in range(3)]
    first = optimizer.seen_at_update[-2][0]
    assert first in ((BEFORE if steps == 1 else after(0, steps - 1)), after(0, steps))
    return first != after(0, steps)


def test_with_nothing_but_known_code_they_run_on(attached, caplog):
    assert lets_copies_run_on(attached)
    assert "waits at once" not in caplog.text


def around(function):
    @functools.wraps(function)
    def mine(*args, **kwargs):
        return function(*args, **kwargs)

    return mine


def wrap(owner, name):
    setattr(owner, name, around(getattr(owner, name)))


class CallMe:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


IN_BETWEEN = ("_optimizer_step", "_release_sub_group", "_post_step", "_prepare_sub_group", "unscale_and_clip_grads")


@pytest.mark.parametrize(
    "change",
    [
        *(functools.partial(wrap, name=name) for name in (*IN_BETWEEN, "_unflatten_partitioned_parameters")),
        lambda each: wrap(each.optimizer, "step"),
        lambda each: setattr(
            each.optimizer, "step", types.MethodType(around(type(each.optimizer).step), each.optimizer)
        ),
        lambda each: setattr(each, "unflatten", lambda: None),
        lambda each: setattr(each, "unscale_and_clip_grads", CallMe(each.unscale_and_clip_grads)),
        lambda each: setattr(each, "unscale_and_clip_grads", functools.partial(around(each.unscale_and_clip_grads))),
        lambda each: setattr(each, "unscale_and_clip_grads", mock.Mock(wraps=each.unscale_and_clip_grads)),
        lambda each: setattr(each, "_post_step", torch.no_grad()(around(each._post_step))),
        lambda each: setattr(each, "timers", CallMe(print)),
        lambda each: setattr(each, "backup_optimizer", hooked()),
        lambda each: setattr(each.optimizer, "aux_optimizer", hooked()),
    ],
)
def test_what_an_instance_has_of_its_own_makes_them_wait(attached, change, caplog):
    change(attached)
    assert not lets_copies_run_on(attached)
    assert not lets_copies_run_on(attached)
    assert caplog.text.count("waits at once") == 1


def hooked():
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    made.register_step_post_hook(lambda *_: None)
    return made


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_hook_of_the_optimizer_makes_them_wait_as_long_as_it_is_there(attached, kind, caplog):
    assert lets_copies_run_on(attached)
    handle = getattr(attached.optimizer, f"register_step_{kind}_hook")(lambda *_: None)
    assert not lets_copies_run_on(attached)
    assert f"waits at once: a step {kind}-hook of SGD" in caplog.text
    handle.remove()
    assert lets_copies_run_on(attached)


@pytest.mark.parametrize(
    ("kind", "register"),
    [("pre", register_optimizer_step_pre_hook), ("post", register_optimizer_step_post_hook)],
)
def test_a_hook_of_all_optimizers_makes_them_wait_as_long_as_it_is_there(attached, kind, register, caplog):
    handle = register(lambda *_: None)
    try:
        assert not lets_copies_run_on(attached)
    finally:
        handle.remove()
    assert f"a step {kind}-hook of all optimizers" in caplog.text
    assert lets_copies_run_on(attached)


@pytest.mark.parametrize("name", IN_BETWEEN)
@pytest.mark.parametrize("attached_before", [False, True])
def test_a_replaced_method_of_the_class_makes_them_wait(
    simulated, optimizer, monkeypatch, name, attached_before, caplog
):
    caplog.set_level(logging.INFO, "transfer")
    if attached_before:
        zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    with monkeypatch.context() as patched:
        patched.setattr(SteppingStage3, name, around(vars(SteppingStage3)[name]))
        zero3.attach(optimizer, build_transfer(DIRECT, simulated))
        assert not lets_copies_run_on(optimizer)
        assert f"`{SteppingStage3.__name__}.{name}`, which is `mine` of {__file__}" in caplog.text
        zero3.detach(optimizer)
        zero3.uninstall()


@pytest.mark.parametrize("name", ["step", "zero_grad"])
def test_a_replaced_method_of_torchs_optimizer_makes_them_wait(attached, monkeypatch, name):
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.SGD, name, around(getattr(torch.optim.SGD, name)), raising=False)
        assert not lets_copies_run_on(attached)
    assert lets_copies_run_on(attached)


def test_a_replaced_function_of_torchs_module_makes_them_wait(attached, monkeypatch):
    module = sys.modules[torch.optim.SGD.__module__]
    with monkeypatch.context() as patched:
        patched.setattr(module, "sgd", around(module.sgd))
        assert not lets_copies_run_on(attached)
    assert lets_copies_run_on(attached)


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper.PipelinedOptimizerSwapper",
        "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper.PartitionedOptimizerSwapper",
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.timer.SynchronizedWallClockTimer",
        "deepspeed.ops.adam.fused_adam.FusedAdam",
        "torch.amp.grad_scaler.GradScaler",
        "torch.optim.adam.Adam",
    ],
)
def test_what_runs_in_a_real_step_is_known(name):
    module, _, cls = name.rpartition(".")
    made = object.__new__(getattr(importlib.import_module(module), cls))
    assert unknown_in(made) is None


class Subclass(SteppingStage3):
    """A user's, that does not even look."""

    def unscale_and_clip_grads(self, sub_group_id, total_norm):
        super().unscale_and_clip_grads(sub_group_id, total_norm)


class LooksAtMasters(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_a_subclass_makes_them_wait(simulated, caplog):
    caplog.set_level(logging.INFO, "transfer")
    optimizer = Subclass(simulated, sub_groups=3)
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    assert not lets_copies_run_on(optimizer)
    assert "`Subclass.unscale_and_clip_grads`" in caplog.text


def test_a_subclass_of_the_optimizer_makes_them_wait(attached):
    attached.optimizer = LooksAtMasters([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert not lets_copies_run_on(attached)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_mode_of_torch_makes_them_wait_unless_it_is_torchs_own(attached):
    with Mode():
        assert not lets_copies_run_on(attached)
    with torch.device("cpu"):
        assert lets_copies_run_on(attached)


def test_a_scheduler_of_torchs_lets_them_run_on_and_hides_nothing(attached):
    torch.optim.lr_scheduler.LambdaLR(attached.optimizer, lambda _: 1.0)
    assert lets_copies_run_on(attached)
    on_top = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    on_top.step = types.MethodType(around(torch.optim.SGD.step), on_top)
    torch.optim.lr_scheduler.LambdaLR(on_top, lambda _: 1.0)
    attached.optimizer = on_top
    assert not lets_copies_run_on(attached)


@pytest.mark.parametrize("version", ["0.15.4", "0.19.9rc1", "0.20.0", "unknown"])
def test_a_version_that_was_not_read_waits(attached, monkeypatch, version, caplog):
    monkeypatch.setattr(deepspeed, "__version__", version)
    assert not lets_copies_run_on(attached)
    assert "was not read, those of 0.16.0 to 0.19.8 were" in caplog.text


@pytest.mark.parametrize("version", ["0.16.0", "0.19.3+unknown", "0.19.8+cu130", "0.19.8.post1"])
def test_a_version_that_was_read_runs_on(attached, monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    assert lets_copies_run_on(attached)


def test_a_patch_of_ours_that_is_gone_makes_them_wait(simulated, optimizer, monkeypatch):
    end = SteppingStage3._post_step
    zero3.attach(optimizer, build_transfer(DIRECT, simulated))
    with monkeypatch.context() as patched:
        patched.setattr(SteppingStage3, "_post_step", end)
        assert not lets_copies_run_on(optimizer)
    assert lets_copies_run_on(optimizer)


SITES = ("_post_step", "step", "_optimizer_step", "_release_sub_group")


def renamed(monkeypatch, cls, site):
    """A DeepSpeed in which a method has another name."""
    monkeypatch.setattr(cls, f"{site}_anew", vars(cls)[site], raising=False)
    monkeypatch.delattr(cls, site)


def with_the_new_name(site):
    def step(self, closure=None):
        name = {each: each + "_anew" if each == site else each for each in SITES}
        for sub_group_id in range(3):
            getattr(self, name["_optimizer_step"])(sub_group_id)
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
            getattr(self, name["_release_sub_group"])(sub_group_id, set())
        getattr(self, name["_post_step"])(set())

    return step


@pytest.mark.parametrize("site", SITES)
def test_a_site_that_moved_is_named_with_the_version_and_each_copy_back_waits(
    simulated, optimizer, monkeypatch, site, caplog
):
    with monkeypatch.context() as patched:
        patched.setattr(SteppingStage3, "step", with_the_new_name(site))
        renamed(patched, SteppingStage3, site)
        zero3.attach(optimizer, build_transfer(DIRECT, simulated))
        warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert len(warnings) == 1
        assert f"DeepSpeed {deepspeed.__version__} has no `{site}`" in warnings[0]
        getattr(optimizer, "step_anew" if site == "step" else "step")()
        assert optimizer.seen_at_gather == [after(0), after(1), after(2)]
        zero3.detach(optimizer)


DEEPSPEEDS = ("_reassign_or_swap_out_partitioned_parameters", "_prepare_sub_group", "unscale_and_clip_grads", *SITES)


@pytest.mark.parametrize("site", DEEPSPEEDS)
def test_install_replaces_nothing_of_a_deepspeed_that_moved_a_site_and_says_so(monkeypatch, site, caplog):
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    with monkeypatch.context() as patched:
        renamed(patched, DeepSpeedZeroOptimizer_Stage3, site)
        before = dict(vars(DeepSpeedZeroOptimizer_Stage3)), dict(vars(DeepSpeedEngine))
        zero3.install()
        assert (dict(vars(DeepSpeedZeroOptimizer_Stage3)), dict(vars(DeepSpeedEngine))) == before
        zero3.uninstall()
    assert f"DeepSpeed {deepspeed.__version__} has no `{site}`" in caplog.text
    assert "nothing is replaced, and DeepSpeed's own code runs" in caplog.text


@pytest.mark.parametrize("moved", ["engine's method", "module"])
def test_install_says_that_deepspeed_makes_its_optimizer_elsewhere(monkeypatch, moved, caplog):
    from deepspeed.runtime.engine import DeepSpeedEngine

    with monkeypatch.context() as patched:
        if moved == "module":
            patched.setitem(sys.modules, "deepspeed.runtime.zero.stage3", None)
        else:
            renamed(patched, DeepSpeedEngine, "_configure_zero_optimizer")
        zero3.install()
    name = "deepspeed.runtime.zero.stage3" if moved == "module" else "_configure_zero_optimizer"
    assert f"has no `{name}`" in caplog.text


@pytest.mark.parametrize("site", DEEPSPEEDS)
def test_attach_leaves_a_deepspeed_that_moved_a_site_alone_and_says_so(simulated, monkeypatch, site, caplog):
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    class Engine:
        optimizer = object.__new__(DeepSpeedZeroOptimizer_Stage3)

    Engine.optimizer.fp16_partitioned_groups_flat = [simulated.device_empty(8, dtype=torch.bfloat16)]
    Engine.optimizer.fp32_partitioned_groups_flat = [torch.arange(8.0)]
    with monkeypatch.context() as patched:
        renamed(patched, DeepSpeedZeroOptimizer_Stage3, site)
        before = dict(vars(DeepSpeedZeroOptimizer_Stage3))
        with build_transfer(DIRECT, simulated) as transfer, contextlib.ExitStack() as stack:
            assert zero3.attach(Engine(), transfer) is transfer
            stack.callback(zero3.detach, Engine())
            assert dict(vars(DeepSpeedZeroOptimizer_Stage3)) == before
            assert transfer.pinned_bytes == 0
    assert f"DeepSpeed {deepspeed.__version__} has no `{site}`" in caplog.text


INSIDE = (
    "_rigid_load_state_dict",
    "load_hp_checkpoint_state_from_checkpoint_dir_stage3",
    "load_module_checkpoint_state_from_checkpoint_dir_stage3",
    "reload_states",
    "_apply_muon_updates_cpu_offload",
)


def with_every_site_of_its_version():
    """Those that this version of DeepSpeed has; older ones do not need the rest."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return [site for site in INSIDE if hasattr(DeepSpeedZeroOptimizer_Stage3, site)]


@pytest.mark.parametrize("site", INSIDE)
def test_a_function_that_copies_in_its_middle_and_has_moved_is_named(monkeypatch, site, caplog):
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if site not in with_every_site_of_its_version():
        pytest.skip(f"DeepSpeed {deepspeed.__version__} is older than this function.")
    with monkeypatch.context() as patched:
        renamed(patched, DeepSpeedZeroOptimizer_Stage3, site)
        zero3.install()
        zero3.uninstall()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warnings
    assert all(f"DeepSpeed {deepspeed.__version__} has no `{site}`" in each for each in warnings)
    assert all("DeepSpeed's own code makes the copies of it" in each for each in warnings)


def test_the_function_of_zenflow_that_has_moved_is_named(monkeypatch, caplog):
    module = pytest.importorskip("deepspeed.runtime.zenflow.engine_stage3", reason="This DeepSpeed has no ZenFlow.")
    with monkeypatch.context() as patched:
        patched.delattr(module, "wait_last_update_and_copy")
        zero3.install()
        zero3.uninstall()
    assert "has no `wait_last_update_and_copy`" in caplog.text


def test_a_deepspeed_that_has_all_of_them_is_silent(caplog):
    zero3.install()
    zero3.uninstall()
    assert caplog.text == ""
