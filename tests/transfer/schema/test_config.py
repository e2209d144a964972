"""Every mistake in a configuration: where it is, what was found, what is allowed, what was meant."""

import importlib.metadata
import os
import pickle
import textwrap

import pytest
import torch
from pydantic import field_validator
from pydantic_core import PydanticCustomError

import transfer
from transfer import (
    ConfigError,
    ConfigFileError,
    PinnedStagedConfig,
    StrategyConfig,
    TransferConfig,
    TransferPolicy,
    build_transfer,
    load_config,
    register_strategy,
    unregister_strategy,
)
from transfer.schema.yaml_file import read_yaml
from transfer.strategies import PageableTransfer


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "h2d.yaml"
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def no_plug_ins(monkeypatch):
    """Hides what is installed on this machine, whose names messages would list too."""
    every = importlib.metadata.entry_points
    names = {"transfer.strategies", "transfer.accelerators"}

    def without(**selected):
        return () if selected.get("group") in names else every(**selected)

    monkeypatch.setattr(importlib.metadata, "entry_points", without)


def complaint(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert isinstance(caught.value, ValueError)
    return str(caught.value).replace(str(path), "FILE")


def test_a_whole_file(yaml_file):
    config = load_config(
        yaml_file("""
            transfer:
              accelerator: simulated
              strategy: pinned_staged
              fallback: false
              pinned_staged: {chunk_elements: 0x400000, buffers: 3}
              rules:
                - {when: {smaller_than: 1MiB}, use: pageable}
                - {when: {source_dtype: float32, destination_dtype: torch.float16, at_least: 2GB}, use: pageable}
                - {when: {source_pinned: true}, use: pageable}
        """)
    )
    assert config.accelerator == "simulated"
    assert config.strategy == "pinned_staged"
    assert config.fallback is False
    assert config.section("pinned_staged") == PinnedStagedConfig(chunk_elements=4_194_304, buffers=3)
    assert config.section("pageable") == StrategyConfig()
    assert [rule.use for rule in config.rules] == ["pageable"] * 3
    assert config.rules[0].when.smaller_than == 1_048_576
    assert config.rules[1].when.at_least == 2_000_000_000
    assert config.rules[1].when.source_dtype is torch.float32
    assert config.rules[1].when.destination_dtype is torch.float16


def test_the_section_of_nvme_swapped(yaml_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config(
        yaml_file("""
            transfer:
              nvme_swapped: {path: ~/swap, chunk_elements: 1048576, buffers: 4, reader: posix, threads: 3,
                             request_bytes: 1MiB, checksums: false, cast: host}
        """)
    )
    section = config.section("nvme_swapped")
    assert section.path == "/home/somebody/swap"
    assert (section.reader, section.threads, section.cast, section.checksums) == ("posix", 3, "host", False)
    # Four buffers of 1,048,576 fp32 values.
    assert (section.chunk_bytes, section.pinned_bytes, section.request_bytes) == (4_194_304, 16_777_216, 1_048_576)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("path: ''", "FILE:2: transfer.nvme_swapped.path: found '' (str): expected the path of a directory"),
        ("path: 7", "FILE:2: transfer.nvme_swapped.path: found 7 (int): expected the path of a directory"),
        ("reader: libaio", "transfer.nvme_swapped.reader: found 'libaio' (str): expected posix, which is the default"),
        (
            "reader: aio",
            "FILE:2: transfer.nvme_swapped.reader: found 'aio' (str): DeepSpeed's op reports reads that failed as done, and was slower wherever both were measured; leave the key out: files are read by the system's preadv",
        ),
        (
            "block_bytes: 1MiB",
            "FILE:2: transfer.nvme_swapped.block_bytes: unknown key 'block_bytes'. Did you mean 'request_bytes'? Allowed here: buffers,",
        ),
        ("threads: 0", "transfer.nvme_swapped.threads: found 0 (int): expected from 1 to 256 threads"),
        ("threads: 4MiB", "this counts threads, not bytes, and takes no unit: such as 8"),
        ("cast: gpu", "transfer.nvme_swapped.cast: found 'gpu' (str): expected device or host."),
        ("request_bytes: 1M", "unknown unit 'M'; write 1MiB or 1MB"),
        ("request_bytes: 0", "expected a multiple of 4096 bytes"),
        ("request_bytes: 5000", "expected a multiple of 4096 bytes"),
        ("checksums: 1", "expected true or false"),
        ("checksum: true", "Did you mean 'checksums'?"),
    ],
)
def test_mistakes_in_nvme_swapped(yaml_file, line, expected):
    assert expected in complaint(yaml_file(f"transfer:\n  nvme_swapped: {{{line}}}\n"))


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "transfer:\n", "transfer: {}\n", "---\n"])
def test_nothing_means_the_defaults_and_an_empty_file_is_told_of(yaml_file, caplog, text):
    path = yaml_file(text)
    assert load_config(path) == TransferConfig()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    empty = f"{path} is empty, and the defaults apply; write `transfer: {{}}` there if that is meant"
    assert told == ([] if "transfer" in text else [empty])
    assert TransferConfig().section("pinned_staged").chunk_elements == 16_777_216


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("67_108_864", 67_108_864),
        ("0x4000000", 67_108_864),
        ("0b11", 3),
        ("1", 1),
        ("+10", 10),
        ("1073741824", 1_073_741_824),
        ("0o17", 15),
        ("1e8", 100_000_000),
        ("1.0e8", 100_000_000),
        ("1.0e+8", 100_000_000),
        ("2^24", 16_777_216),
        ("2**24", 16_777_216),
        ("'2^24'", 16_777_216),
        ("16Mi", 16_777_216),
        ("1.5 Ki", 1536),
    ],
)
def test_ways_to_write_a_count(yaml_file, written, meant):
    path = yaml_file(f"transfer: {{pinned_staged: {{chunk_elements: {written}}}}}")
    assert load_config(path).section("pinned_staged").chunk_elements == meant


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("1e-8", "found 1e-08 (float): expected a whole number of elements; such as 16777216"),
        ("2^24.5", "found '2^24.5' (str): expected a whole number of elements"),
        ("2^40", "found '2^40' (str): expected from 1 to 1073741824 elements"),
        ("2^999999999999", "found '2^999999999999' (str): expected a whole number of elements"),
        ("1.3Ki", "found '1.3Ki' (str): expected a whole number of elements"),
        ("16M", "this counts elements, not bytes, and takes no unit: such as 16777216"),
        ("010", "found '010' (str): expected a whole number of elements; leave the leading zero out: 10"),
        ("'0_10'", "leave the leading zero out: 10"),
        ("1:30", "found '1:30' (str): expected a whole number of elements; such as 16777216"),
        ("yes", "found 'yes' (str): expected a whole number of elements"),
        ("1.5", "found 1.5 (float): expected a whole number of elements; such as 16777216"),
        ("256MiB", "this counts elements, not bytes, and takes no unit"),
        ("auto", "found 'auto' (str): expected a whole number of elements"),
        ("true", "found True (bool): expected a whole number of elements"),
        ("", "found nothing: expected a whole number of elements"),
        ("0", "found 0 (int): expected from 1 to 1073741824 elements"),
        ("-4", "found -4 (int): expected from 1 to 1073741824 elements"),
        ("[1]", "found [1] (list): expected a whole number of elements"),
        (".inf", "found inf (float)"),
        (".nan", "found nan (float)"),
    ],
)
def test_ways_not_to_write_a_count(yaml_file, written, hint):
    path = yaml_file(f"transfer:\n  pinned_staged:\n    chunk_elements: {written}\n")
    message = complaint(path)
    assert message.startswith("FILE:3: transfer.pinned_staged.chunk_elements: ")
    assert hint in message


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1MiB", 2**20),
        ("1 MiB", 2**20),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("2KB", 2000),
        ("1GiB", 2**30),
        ("4096", 4096),
        ("64Mi", 2**26),
        ("2^20", 2**20),
        ("1e6", 10**6),
    ],
)
def test_ways_to_write_a_size(yaml_file, written, size):
    path = yaml_file(f"transfer: {{rules: [{{when: {{smaller_than: {written}}}, use: pageable}}]}}")
    assert load_config(path).rules[0].when.smaller_than == size


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("1M", "unknown unit 'M'; write 1MiB or 1MB"),
        ("64G", "unknown unit 'G'; write 64GiB or 64GB"),
        ("1mib", "unknown unit 'mib'; write 1MiB or 1MB"),
        ("010", "leave the leading zero out: 10"),
        ("2^63", "no machine has so many bytes"),
        ("1.3B", "not a whole number of bytes"),
        ("-1", "expected a size in bytes"),
        ("big", "such as 1048576, 2^20 or 1MiB"),
        ("yes", "expected a size in bytes"),
    ],
)
def test_ways_not_to_write_a_size(yaml_file, written, hint):
    message = complaint(yaml_file(f"transfer: {{rules: [{{when: {{smaller_than: {written}}}, use: pageable}}]}}"))
    assert message.startswith("FILE:1: transfer.rules[0].when.smaller_than: found ")
    assert hint in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "transfer:\n  strategi: pageable\n",
            "FILE:2: transfer.strategi: unknown key 'strategi'. Did you mean 'strategy'? "
            "Allowed here: accelerator, completion, fallback, nvme_swapped, pageable, pinned_direct, pinned_staged, rules, strategy, verify, zero3.",
        ),
        (
            "transfer:\n  pin_memroy: true\n",
            "FILE:2: transfer.pin_memroy: unknown key 'pin_memroy'. "
            "Allowed here: accelerator, completion, fallback, nvme_swapped, pageable, pinned_direct, pinned_staged, rules, strategy, verify, zero3.",
        ),
        (
            "transfer:\n  chunk_elements: 4\n",
            "FILE:2: transfer.chunk_elements: unknown key 'chunk_elements'. It belongs under 'nvme_swapped' or 'pinned_direct' or 'pinned_staged'.",
        ),
        (
            "transfer:\n  pinned_staged:\n    fallback: true\n",
            "FILE:3: transfer.pinned_staged.fallback: unknown key 'fallback'. It belongs at the top of the configuration.",
        ),
        ("strategy: pageable\n", "FILE:1: strategy: this key belongs under 'transfer'"),
        ("transfer: {}\npinned_staged: {buffers: 2}\n", "FILE:2: pinned_staged: this key belongs under 'transfer'"),
        (
            "transfr: {}\n",
            "FILE:1: transfr: unknown key 'transfr'. Everything belongs under the one top-level key 'transfer'.",
        ),
        ("- transfer\n", "FILE:1: expected one top-level key, 'transfer', found ['transfer'] (list)"),
        ("just text\n", "FILE:1: expected one top-level key, 'transfer', found 'just text' (str)"),
        ("transfer: [1]\n", "FILE:1: transfer: found [1] (list): expected a mapping"),
        ("transfer: pageable\n", "FILE:1: transfer: found 'pageable' (str): expected a mapping"),
        ("transfer:\n  pinned_staged: 4\n", "FILE:2: transfer.pinned_staged: found 4 (int): expected a mapping"),
        ("transfer:\n  rules: {}\n", "FILE:2: transfer.rules: found {} (dict): expected a list"),
        (
            "transfer:\n  rules:\n  - use: pageable\n",
            "FILE:3: transfer.rules[0].when: this key is required",
        ),
        (
            "transfer:\n  rules:\n  - when: {}\n    use: pageable\n",
            "FILE:3: transfer.rules[0].when: found {} (dict): a rule needs at least one condition",
        ),
        (
            "transfer:\n  rules:\n  - when: {smaler_than: 4}\n    use: pageable\n",
            "FILE:3: transfer.rules[0].when.smaler_than: unknown key 'smaler_than'. Did you mean 'smaller_than'?",
        ),
        (
            "transfer:\n  rules:\n  - when: {source_dtype: fp32}\n    use: pageable\n",
            "FILE:3: transfer.rules[0].when.source_dtype: found 'fp32' (str): expected the name of a torch dtype; did you mean 'float32'?",
        ),
        ("transfer:\n  fallback: maybe\n", "FILE:2: transfer.fallback: found 'maybe' (str): expected true or false"),
        ("transfer:\n  fallback: 1\n", "FILE:2: transfer.fallback: found 1 (int): expected true or false"),
        (
            "transfer:\n  strategy: pinned\n",
            "FILE:2: transfer.strategy: found 'pinned' (str): unknown strategy 'pinned'. Did you mean 'pinned_staged'? "
            "Registered: measured, nvme_swapped, pageable, pinned_direct, pinned_staged.",
        ),
        (
            "transfer:\n  strategy: measure\n",
            "FILE:2: transfer.strategy: found 'measure' (str): unknown strategy 'measure'. Did you mean 'measured'?",
        ),
        (
            "transfer:\n  completion: defered\n",
            "FILE:2: transfer.completion: found 'defered' (str): expected deferred or immediate.",
        ),
        (
            "transfer:\n  pinned_direct: {max_page_locked: 64G}\n",
            "FILE:2: transfer.pinned_direct.max_page_locked: found '64G' (str): unknown unit 'G'; write 64GiB or 64GB",
        ),
        (
            "transfer:\n  strategy: off\n",
            "FILE:2: transfer.strategy: found 'off' (str): unknown strategy 'off'. Registered: measured, ",
        ),
        (
            "transfer:\n  rules:\n  - {when: {source_pinned: on}, use: No}\n",
            "FILE:3: transfer.rules[0].use: found 'No' (str): unknown strategy 'No'. Registered: nvme_swapped, ",
        ),
        ("transfer:\n  completion: off\n", "found 'off' (str): expected deferred or immediate."),
        (
            "transfer:\n  zero3: {host_memroy: 1GiB}\n",
            "FILE:2: transfer.zero3.host_memroy: unknown key 'host_memroy'. Did you mean 'host_memory'?",
        ),
        (
            "transfer:\n  zero3: {host_memory: 8G}\n",
            "FILE:2: transfer.zero3.host_memory: found '8G' (str): unknown unit",
        ),
        (
            "transfer:\n  zero3: {paths: ['']}\n",
            "FILE:2: transfer.zero3.paths[0]: found '' (str): expected the path of",
        ),
        (
            "transfer:\n  pinned_staged: {buffers: 02}\n",
            "found '02' (str): expected a whole number of buffers; leave the leading zero out: 2",
        ),
        (
            "transfer:\n  pinned_staged: {buffers: 010}\n",
            "FILE:2: transfer.pinned_staged.buffers: found '010' (str): expected a whole",
        ),
        ("transfer:\n  pinned_staged: {buffers: 0_10}\n", "leave the leading zero out: 10"),
        ("transfer:\n  pinned_staged: {buffers: -0100}\n", "leave the leading zero out: 100"),
        ("transfer:\n  pinned_staged: {buffers: 1:30}\n", "FILE:2: transfer.pinned_staged.buffers: found '1:30' (str)"),
        (
            "transfer:\n  pinned_staged: {buffers: 1:30.5}\n",
            "FILE:2: transfer.pinned_staged.buffers: found '1:30.5' (str)",
        ),
        ("transfer:\n  strategy: auto\n", "Leave the key out for the default."),
        ("transfer:\n  strategy: 3\n", "FILE:2: transfer.strategy: found 3 (int): unknown strategy 3."),
        (
            "transfer:\n  accelerator: CPU\n",
            "FILE:2: transfer.accelerator: found 'CPU' (str): unknown accelerator 'CPU'. "
            "Did you mean 'cpu'? Registered: ",
        ),
        (
            "transfer:\n  accelerator: gpu\n",
            "found 'gpu' (str): unknown accelerator 'gpu'. Did you mean 'cuda'?",
        ),
        (
            "transfer:\n  strategy: pageable\n  fallback: true\n  strategy: pageable\n",
            "FILE:4: transfer.strategy: duplicate key; first on line 2",
        ),
        ("transfer: {}\ntransfer: {}\n", "FILE:2: transfer: duplicate key; first on line 1"),
        (
            "transfer:\n  pinned_staged:\n    buffers: 2\n    buffers: 2\n",
            "FILE:4: transfer.pinned_staged.buffers: duplicate key",
        ),
        (
            "transfer:\n  rules:\n  - when: {smaller_than: }\n    use: pageable\n",
            "FILE:3: transfer.rules[0].when.smaller_than: found nothing: expected a size in bytes",
        ),
        (
            "transfer:\n  rules:\n  - {when: {smaller_than: 1MiB, at_least: 1MiB}, use: pageable}\n",
            "FILE:3: transfer.rules[0].when: found {'smaller_than': '1MiB', 'at_least': '1MiB'} (dict): no copy is both",
        ),
        (
            "transfer:\n  rules:\n  - {when: {strategy: pageable}, use: pageable}\n",
            "It belongs at the top of the configuration.",
        ),
        (
            "transfer:\n  strategy: 2001-13-45\n",
            "FILE:2: transfer.strategy: found '2001-13-45' (str): unknown strategy '2001-13-45'.",
        ),
        ("transfer:\n  pinned_staged: {buffers: 0x_}\n", "FILE:2: transfer.pinned_staged.buffers: found '0x_' (str)"),
        ("transfer:\n  fallback: !!bool maybe\n", "FILE:2: this is not YAML: 'maybe' cannot be read"),
        ("transfer:\n  fallback: !!timestamp x\n", "FILE:2: this is not YAML: "),
        ("transfer:\n  fallback: !!int abc\n", "FILE:2: this is not YAML: "),
        ("transfer:\n  fallback: " + 5000 * "[" + "\n", "this is not YAML: "),
        ("transfer:\n  fallback: " + 5000 * "9" + "\n", "FILE:2: this is not YAML: "),
        ("transfer:\n\tstrategy: pageable\n", "FILE:2: this is not YAML: "),
        ("transfer: {\n", "this is not YAML: "),
        ("transfer: {}\n---\ntransfer: {}\n", "FILE:2: this is not YAML: "),
        ("transfer: !!python/object:os.system {}\n", "FILE:1: this is not YAML: "),
        ("transfer:\n  verify: yes\n", "FILE:2: transfer.verify: found 'yes' (str): expected off, sample or full."),
        ("transfer:\n  1: x\n", "FILE:2: transfer.1: keys must be text"),
        ("transfer:\n  on: true\n", "FILE:2: transfer.on: unknown key 'on'."),
        ("transfer:\n  pinned_staged: {7: 2}\n", "FILE:2: transfer.pinned_staged.7: keys must be text"),
        ("? [a]\n: b\n", "FILE:1: "),
    ],
)
@pytest.mark.usefixtures("no_plug_ins")
def test_each_mistake_has_its_place_and_its_remedy(yaml_file, text, expected):
    assert expected in complaint(yaml_file(text))


def test_what_zero3_does_with_state_in_files(yaml_file):
    assert TransferConfig().zero3.host_memory == 0
    config = load_config(yaml_file("transfer:\n  zero3: {host_memory: 1.5GiB, paths: [/one, ~/two]}\n"))
    assert config.zero3.host_memory == 3 * 2**29
    assert config.zero3.paths == ("/one", os.path.expanduser("~/two"))  # noqa: PTH111


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *(("null", None), ("~", None), ("Null", None), ("", None), ("true", True), ("FALSE", False), ("tRue", "tRue")),
        *(
            ("yes", "yes"),
            ("off", "off"),
            ("n", "n"),
            ("-0", 0),
            ("+12", 12),
            ("0o14", 12),
            ("0xC", 12),
            ("0b1", "0b1"),
        ),
        *(("012", "012"), ("1_000", "1_000"), ("1:30", "1:30"), ("1e3", 1000.0), (".5", 0.5), ("-1.5E-2", -0.015)),
        *(("1.", 1.0), ("-.INF", float("-inf")), (".5.", ".5."), ("+.nan", "+.nan"), ("2001-01-01", "2001-01-01")),
        *(("=", "="), ("'12'", "12"), ("!!str 12", "12"), ("0.1", 0.1), ("00.1", "00.1"), ("- 1", [1])),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path, written, read):
    """The core schema, https://yaml.org/spec/1.2.2/#1032-tag-resolution, but for numbers with leading zeros."""
    path = tmp_path / "one.yaml"
    path.write_text(f"{written}\n")
    content, _, _ = read_yaml(path)
    assert (type(content), content) == (type(read), read)


def test_every_mistake_is_listed_at_once(yaml_file):
    path = yaml_file("transfer:\n  strategi: x\n  fallback: maybe\n  pinned_staged: {buffers: 0, chunks: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    keys = {(problem.line, problem.key) for problem in caught.value.problems}
    assert keys == {
        (2, "transfer.strategi"),
        (3, "transfer.fallback"),
        (4, "transfer.pinned_staged.buffers"),
        (4, "transfer.pinned_staged.chunks"),
    }
    assert all(problem.file == str(path) for problem in caught.value.problems)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_anchors_and_merges_work_and_a_loop_of_anchors_ends(yaml_file):
    config = load_config(
        yaml_file("""
            transfer:
              pinned_staged: &ring {chunk_elements: 5}
              rules:
              - {when: &small {smaller_than: 4}, use: pageable}
              - {when: {<<: *small, at_least: 2}, use: pageable}
        """)
    )
    assert config.section("pinned_staged").chunk_elements == 5
    assert config.rules[1].when.smaller_than == 4
    assert "rules" in complaint(yaml_file("transfer:\n  rules: &loop [*loop]\n"))


@pytest.mark.parametrize(
    ("word", "means"),
    [("true", True), ("TRUE", True), ("on", True), ("Yes", True), ("off", False), ("NO", False), ("'no'", False)],
)
def test_ways_to_write_true_and_false(yaml_file, word, means):
    config = load_config(yaml_file(f"transfer: {{fallback: {word}, nvme_swapped: {{checksums: {word}}}}}"))
    assert config.fallback is means
    assert config.section("nvme_swapped").checksums is means
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_file_without_an_end(tmp_path):
    (tmp_path / "long.yaml").write_text("transfer: {}\n" + "#" * 2**20)
    for path in ("/dev/zero", tmp_path / "long.yaml"):
        with pytest.raises(ConfigFileError, match="longer than 1048576 bytes"):
            load_config(path)
    (tmp_path / "windows.yaml").write_bytes(b"transfer:\r\n  strategy: pageable\r\n")
    assert load_config(tmp_path / "windows.yaml").strategy == "pageable"


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "nowhere.yaml"
    with pytest.raises(FileNotFoundError, match="no such configuration file") as caught:
        load_config(missing)
    assert str(missing) in str(caught.value)
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(ConfigFileError, match="cannot be read") as caught:
        load_config(tmp_path)
    assert isinstance(caught.value, OSError)
    (tmp_path / "latin.yaml").write_bytes(b"transfer: {strategy: \xe9}\n")
    for path in (tmp_path / "latin.yaml", "~nosuchuser/h2d.yaml", "nul\0.yaml"):
        with pytest.raises(ConfigFileError, match="cannot be read"):
            load_config(path)


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "h2d.yaml").write_text("transfer: {strategy: pageable}")
    assert load_config("~/h2d.yaml").strategy == "pageable"


def test_a_mapping_is_the_content_of_the_section():
    assert TransferPolicy({"strategy": "pageable"}).config.strategy == "pageable"
    assert TransferPolicy({}).config == TransferConfig()
    with pytest.raises(ConfigError, match="7: keys must be text"):
        build_transfer({7: 2})
    with pytest.raises(ConfigError, match=r"fallback: found a very long number \(int\): expected true or false"):
        build_transfer({"fallback": 10**5000})
    for name in ("cls", "self"):
        with pytest.raises(ConfigError, match=f"unknown key '{name}'"):
            TransferConfig(**{name: 1})
    with pytest.raises(ConfigError, match="a mapping is the content of that section: leave 'transfer' out"):
        build_transfer({"transfer": {"strategy": "pageable"}})
    with pytest.raises(ConfigError, match=r"^pinned_staged\.buffers: found 'x'"):
        build_transfer({"pinned_staged": {"buffers": "x"}})
    with pytest.raises(ConfigError, match="expected a TransferConfig, a mapping or the path"):
        build_transfer(3)
    assert build_transfer(TransferConfig(strategy="pageable")).policy.config.strategy == "pageable"


def test_the_environment_names_a_file_for_where_none_is_given(yaml_file, monkeypatch):
    monkeypatch.setenv("H2D_CONFIG", str(yaml_file("transfer: {strategy: pageable}")))
    assert build_transfer().policy.config.strategy == "pageable"
    assert build_transfer({}).policy.config.strategy is None
    monkeypatch.setenv("H2D_CONFIG", "")
    assert build_transfer().policy.config.strategy is None
    monkeypatch.setenv("H2D_CONFIG", os.devnull + "/nowhere")
    with pytest.raises(ConfigError):
        build_transfer()


def test_configurations_are_frozen_and_pickle():
    config = TransferConfig(
        strategy="pinned_staged",
        pinned_staged={"chunk_elements": 7},
        rules=[{"when": {"source_dtype": "float32"}, "use": "pageable"}],
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.pinned_staged.chunk_elements == 7
    for change in (
        lambda: setattr(config, "strategy", "pageable"),
        lambda: setattr(config.pinned_staged, "buffers", 9),
    ):
        with pytest.raises(ValueError, match="frozen"):
            change()
    with pytest.raises(ConfigError, match="unknown key 'chunk'"):
        TransferConfig(pinned_staged={"chunk": 7})
    with pytest.raises(transfer.TransferError, match="unknown key 'buffer'"):
        PinnedStagedConfig(buffer=7)


def test_aliases_within_aliases_are_read_in_no_time(yaml_file):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "unknown key 'a11'" in complaint(yaml_file("\n".join(levels)))


def test_sizes_are_exact(yaml_file):
    path = yaml_file("transfer: {rules: [{when: {smaller_than: 9007199254740993B}, use: pageable}]}")
    assert load_config(path).rules[0].when.smaller_than == 9_007_199_254_740_993


def test_a_plug_in_that_does_not_load_hides_no_mistake(tmp_path, monkeypatch):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[transfer.strategies]\nbroken = no_such_module:Broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'strategy'"):
        build_transfer({"strateg": "pageable"})


class MineConfig(StrategyConfig):
    flavour: str = "plain"

    @field_validator("flavour")
    @classmethod
    def _edible(cls, value):
        if value == "soap":
            raise PydanticCustomError("acme", "{what} is no flavour", {"what": value})
        return value


class Mine(PageableTransfer):
    Config = MineConfig


@pytest.fixture
def mine():
    register_strategy("mine", Mine)
    yield
    unregister_strategy("mine")


@pytest.mark.usefixtures("mine")
def test_a_registered_strategy_owns_a_section(yaml_file):
    config = load_config(yaml_file("transfer:\n  strategy: mine\n  mine: {flavour: spicy}\n"))
    assert config.section("mine") == MineConfig(flavour="spicy")
    assert pickle.loads(pickle.dumps(config)) == config
    message = complaint(yaml_file("transfer:\n  mine: {flavor: spicy}\n"))
    assert "FILE:2: transfer.mine.flavour: found 'soap' (str): soap is no flavour" in complaint(
        yaml_file("transfer:\n  mine: {flavour: soap}\n")
    )
    assert "transfer.mine.flavor: unknown key 'flavor'. Did you mean 'flavour'? Allowed here: flavour." in message


def test_a_strategy_that_is_not_registered_has_no_section(yaml_file):
    assert "unknown key 'mine'" in complaint(yaml_file("transfer:\n  mine: {flavour: spicy}\n"))
