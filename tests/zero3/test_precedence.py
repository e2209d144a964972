"""Where the configuration comes from: argument, environment, DeepSpeed config, defaults."""

import types

import pytest

from tests.zero3.stand_ins import Stage3, chunk, engine_of
from transfer import ConfigError, zero3


def test_the_same_configuration_keeps_the_transfer(simulated):
    engine = engine_of(Stage3(simulated))
    config = {"accelerator": "simulated", "strategy": "pageable"}
    first = zero3.attach(engine, config)
    assert zero3.attach(engine, dict(config)) is first
    assert zero3.attach(engine, {**config, "fallback": False}) is not first


def test_the_argument_wins(engine, environment):
    assert chunk(zero3.attach(engine, {"pinned_staged": {"chunk_elements": 1}})) == 1


def test_then_the_environment(engine, environment, caplog):
    assert chunk(zero3.attach(engine)) == 2
    assert "$H2D_CONFIG overrides host_to_device_transfer of the DeepSpeed config" in caplog.text


@pytest.mark.parametrize("blank", ["", "  "])
def test_then_the_deepspeed_config(engine, monkeypatch, blank):
    monkeypatch.setenv("H2D_CONFIG", blank)
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


@pytest.mark.parametrize(
    ("device", "ratio", "refused"),
    [
        ("nvme", 0.5, True),
        ("nvme", "0.5", True),
        ("nvme", 1.0, False),
        ("nvme", "1.0", False),
        ("nvme", "auto", False),
        ("cpu", 0.5, False),
        ("cpu", "0.5", False),
    ],
)
def test_a_ratio_needs_offload_to_the_host(simulated, engine, device, ratio, refused):
    zero = {"stage": 3, "offload_optimizer": {"device": device, "ratio": ratio}}
    other = engine_of(Stage3(simulated), zero_optimization=zero)
    if not refused:
        zero3.attach(other)
        return
    with pytest.raises(ConfigError, match=r"offload_optimizer\.ratio: found 0\.5 .*only `device: cpu`"):
        zero3.attach(other)


def test_what_deepspeed_has_understood_counts_and_not_what_was_written(simulated, engine):
    """As for a config that a framework has filled in, or that DeepSpeed has read from a file."""
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    other = engine_of(Stage3(simulated), zero_optimization={"offload_optimizer": {"device": "cpu"}})
    offload = DeepSpeedZeroOffloadOptimizerConfig(device="nvme", ratio="0.5")
    other._config.zero_config = types.SimpleNamespace(offload_optimizer=offload)
    with pytest.raises(ConfigError, match=r"offload_optimizer\.ratio: found 0\.5 .*only `device: cpu`"):
        zero3.attach(other)


@pytest.mark.parametrize("ratio", [1.5, -0.1, float("nan")])
def test_deepspeed_itself_refuses_an_impossible_ratio(ratio):
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    with pytest.raises(ValueError, match="ratio"):
        DeepSpeedZeroOffloadOptimizerConfig(device="cpu", ratio=ratio)
