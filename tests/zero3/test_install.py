"""install and uninstall, on stand-ins and on DeepSpeed's own classes."""

import contextlib
import json

import pytest

from tests.zero3.stand_ins import COPY_BACK, SECTION, Engine, Spy, Stage3, chunk, copy_backs
from transfer import ConfigError, zero3
from transfer.zero3 import patching
from transfer.zero3.attachments import attachments


@pytest.mark.usefixtures("stand_ins", "engine")
def test_uninstall_goes_on_after_a_close_that_fails(simulated, monkeypatch):
    zero3.install({"strategy": "pageable"})
    engines = [Engine(simulated) for _ in range(3)]
    failed = attachments.get(engines[1].optimizer).transfer
    monkeypatch.setattr(failed, "close", lambda: (_ for _ in ()).throw(RuntimeError("lost device")))
    with pytest.raises(RuntimeError, match="lost device"):
        zero3.uninstall()
    for made in engines:
        made.optimizer._reassign_or_swap_out_partitioned_parameters(0)
        assert made.optimizer.calls == [("deepspeed", 0)]
    assert not patching.active


def test_a_mistake_in_the_environments_file_is_found_by_install(tmp_path, monkeypatch):
    path = tmp_path / "h2d.yaml"
    path.write_text("transfer: {strategi: pageable}")
    monkeypatch.setenv("H2D_CONFIG", str(path))
    with pytest.raises(ConfigError, match="unknown key 'strategi'"):
        zero3.install()
    assert attachments.installed is None


def test_a_refused_install_installs_nothing():
    with pytest.raises(ConfigError):
        zero3.install({"strategy": "no such thing"})
    assert attachments.installed is None
    assert not patching.active


def test_install_patches_deepspeeds_classes_and_uninstall_restores_them():
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


@pytest.mark.usefixtures("stand_ins", "engine")
def test_engines_made_after_install_are_attached_with_their_own_configuration(simulated):
    zero3.install()
    made = Engine(simulated, host_to_device_transfer=SECTION)
    assert chunk(attachments.get(made.optimizer).transfer) == 3
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
        Engine(simulated, host_to_device_transfer=json.loads('{"fallback": "maybe"}'))
