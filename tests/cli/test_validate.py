"""``h2d validate`` and ``h2d schema``: mistakes of whole files, and what editors are told."""

import json
import re
import textwrap

import pytest

from transfer import (
    ConfigError,
    StrategyConfig,
    TransferConfig,
    cli,
    load_config,
    register_strategy,
    unregister_strategy,
)
from transfer.strategies import PageableTransfer


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write


def validated(capsys, *arguments):
    status = cli.main(["validate", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def test_every_mistake_of_a_deepspeed_config_is_told_with_its_line(write, capsys):
    path = write(
        "ds_config.json",
        """\
        {
        \t"zero_optimization": {"stage": 3,
        \t\t"offload_optimizer": {"device": "nvme", "ratio": "0.5"}},
        \t"host_to_device_transfer": {
        \t\t"strategy": "pined_direct",
        \t\t"rules": [
        \t\t\t{"when": {"smaller_than": "1M"},
        \t\t\t "use": "pageable"}]}
        }
        """,
    )
    status, out = validated(capsys, path)
    assert status == 1
    lines = out.splitlines()
    assert [line.partition(": ")[0] for line in lines[:3]] == [f"{path}:3", f"{path}:5", f"{path}:7"]
    assert "ratio: found '0.5' (str) with `device: nvme`" in lines[0]
    assert "Did you mean 'pinned_direct'?" in lines[1]
    assert "rules[0].when.smaller_than: found '1M' (str): unknown unit 'M'; write 1MiB or 1MB" in lines[2]
    assert lines[3].startswith("  The key configures, and activates nothing")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({}, "only stage 3 is served"),
        ({"zero_optimization": {"stage": 2}}, "`zero_optimization.stage` is 2: only stage 3 is served."),
        ({"zero_optimization": {"stage": 3}}, "nothing is copied back"),
        ({"h2d": {}}, "h2d: unknown key of the DeepSpeed config; did you mean 'host_to_device_transfer'?"),
        ({"host_to_device_transfer": 3}, "expected a mapping, or the path of a YAML file"),
        ({"host_to_device_transfer": "nowhere.yaml"}, "nowhere.yaml: no such configuration file"),
        ([1], "expected a DeepSpeed config, found [1] (list)"),
    ],
)
def test_what_else_is_told_of_a_deepspeed_config(write, capsys, content, told):
    status, out = validated(capsys, write("ds.json", json.dumps(content)))
    assert told in out
    assert status == (0 if "stage" in told or "nothing is" in told else 1)


def test_a_right_deepspeed_config(write, capsys):
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.8}, "zenflow": {"topk_ratio": 0.1}}
    path = write("ds.json", json.dumps({"zero_optimization": offload, "host_to_device_transfer": {"fallback": False}}))
    status, out = validated(capsys, path)
    assert status == 0
    assert out.splitlines()[0] == f"{path}: no mistakes (DeepSpeed JSON)"
    assert "`ratio` is 0.8" in out
    assert "ZenFlow is on" in out
    assert "no key" not in out


def test_files_that_say_nothing_or_cannot_be_read(write, capsys, caplog):
    empty, broken = write("empty.yaml", "# nothing\n"), write("broken.json", '{\n"a": 1,}')
    status, out = validated(capsys, empty)
    assert status == 0
    assert "The file is empty, so the defaults apply." in out
    status, out = validated(capsys, empty, broken, empty + "x")
    assert status == 1
    assert f"{broken}:2: this is not JSON: " in out
    assert f"{empty}x: no such configuration file" in out
    doubled = write("doubled.json", '{"a": 1,\n"a": 2}')
    assert f"{doubled}:2: a: duplicate key; first on line 1" in validated(capsys, doubled)[1]


def test_the_report_as_json(write, capsys):
    right, wrong = write("right.yaml", "transfer: {}\n"), write("wrong.yaml", "transfer:\n  strategi: x\n")
    status, out = validated(capsys, "--json", right, wrong)
    report = json.loads(out)
    assert (status, report["schema_version"], report["command"]) == (1, 1, "validate")
    assert [one["valid"] for one in report["files"]] == [True, False]
    (problem,) = report["files"][1]["problems"]
    assert (problem["line"], problem["key"]) == (2, "transfer.strategi")


def schema(capsys):
    assert cli.main(["schema"]) == 0
    return json.loads(capsys.readouterr().out)


def allows(schema, value, root):
    """What a JSON schema says of a value, for the words that ours uses."""
    if "$ref" in schema:
        return allows(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema:
        return any(allows(each, value, root) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "null": type(None)}
    wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, kinds[kind]) for kind in wanted) or (type(value) is bool and "boolean" not in wanted):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None and len(value) >= schema.get("minLength", 0)
    if isinstance(value, int) and not isinstance(value, bool):
        in_range = schema.get("minimum", value) <= value <= schema.get("maximum", value)
        return in_range and value % schema.get("multipleOf", 1) == 0
    if isinstance(value, list):
        return all(allows(schema["items"], each, root) for each in value)
    if isinstance(value, dict):
        known = schema["properties"]
        return set(schema.get("required", ())) <= set(value) <= set(known) and all(
            allows(known[key], each, root) for key, each in value.items()
        )
    return True


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ({}, True),
        ({"strategy": "measured", "accelerator": "simulated", "completion": "immediate", "verify": "off"}, True),
        ({"strategy": "pinned"}, False),
        ({"verify": "often"}, False),
        ({"fallback": True}, True),
        ({"fallback": 1}, False),
        ({"strategi": "pageable"}, False),
        ({"pinned_staged": {"chunk_elements": 2**30, "buffers": 64}}, True),
        ({"pinned_staged": None}, True),
        ({"pinned_staged": {"chunk_elements": 2**30 + 1}}, False),
        ({"pinned_staged": {"buffers": 0}}, False),
        ({"pinned_staged": {"buffers": 65}}, False),
        ({"pinned_staged": {"chunk_elements": "16Mi"}}, True),
        ({"pinned_staged": {"chunk_elements": "2^24"}}, True),
        ({"pinned_staged": {"chunk_elements": "0x100"}}, True),
        ({"pinned_staged": {"chunk_elements": "16MiB"}}, False),
        ({"pinned_staged": {"chunk_elements": "010"}}, False),
        ({"pinned_staged": {"path": "/x"}}, False),
        ({"pinned_direct": {"max_page_locked": "64GiB", "page_lock": False}}, True),
        ({"pinned_direct": {"max_page_locked": "64G"}}, False),
        ({"pinned_direct": {"max_page_locked": -1}}, False),
        (
            {"nvme_swapped": {"threads": 256, "cast": "host", "reader": "posix", "request_bytes": 8192, "path": "/x"}},
            True,
        ),
        ({"nvme_swapped": {"threads": 257}}, False),
        ({"nvme_swapped": {"reader": "aio"}}, False),
        ({"nvme_swapped": {"request_bytes": 5000}}, False),
        ({"nvme_swapped": {"path": ""}}, False),
        ({"rules": [{"when": {"smaller_than": "1MiB", "source_dtype": "float32"}, "use": "pageable"}]}, True),
        ({"rules": [{"when": {"smaller_than": "1M"}, "use": "pageable"}]}, False),
        ({"rules": [{"use": "pageable"}]}, False),
        ({"rules": {}}, False),
        ({"zero3": {"host_memory": "8GiB", "paths": ["/a"]}}, True),
        ({"zero3": {"paths": [""]}}, False),
    ],
)
def test_an_editor_allows_what_is_read_and_nothing_else(capsys, write, content, right):
    whole = schema(capsys)
    assert allows(whole, {"transfer": content}, whole) is right
    path = write("transfer.yaml", json.dumps({"transfer": content}))
    if right:
        load_config(path)
    else:
        with pytest.raises(ConfigError):
            load_config(path)


def explained(keys, model):
    for key, field in model.model_fields.items():
        assert keys[key]["description"], key
        if "default" in keys[key] and key not in ("rules", "zero3"):
            assert keys[key]["default"] == field.default


def test_every_key_is_explained_and_defaults_are_the_models(capsys):
    whole = schema(capsys)
    content = whole["properties"]["transfer"]["properties"]
    assert set(content) == {*TransferConfig.model_fields, *TransferConfig.sections()}
    explained(content, TransferConfig)
    for name, model in TransferConfig.sections().items():
        explained(content[name]["properties"], model)
    assert "left out: the default policy" in content["strategy"]["description"]
    assert whole["additionalProperties"] is False


class AcmeConfig(StrategyConfig):
    """The section ``acme``.

    Attributes:
        flavour: What it tastes of.
    """

    flavour: str = "plain"


def test_a_strategy_of_a_plug_in_has_its_section(capsys, tmp_path):
    register_strategy("acme", type("Acme", (PageableTransfer,), {"Config": AcmeConfig}))
    try:
        content = schema(capsys)["properties"]["transfer"]["properties"]
        assert cli.main(["schema", "--output", str(tmp_path / "h2d.json")]) == 0
    finally:
        unregister_strategy("acme")
    assert content["acme"]["properties"]["flavour"]["description"] == "What it tastes of."
    assert "acme" in content["strategy"]["anyOf"][0]["enum"]
    assert json.loads((tmp_path / "h2d.json").read_text())["properties"]["transfer"]["properties"] == content
    assert cli.main(["schema", "--output", str(tmp_path / "nowhere" / "h2d.json")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err
