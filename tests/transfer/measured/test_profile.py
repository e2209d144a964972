"""Profiles as files: what is written is read again, mistakes have a place, and other machines are told apart."""

import os
import pickle
import textwrap

import pytest
import torch

from accelerators import hardware
from accelerators.simulated.accelerator import SimulatedAccelerator
from transfer import ConfigError, ConfigFileError, ConfigFileNotFoundError
from transfer.measured.profile import MachineProfile
from transfer.measured.profile_file import default_path

TEXT = """\
machine_profile:
  format_version: 2
  machine:
    accelerator: simulated
    device: simulated
    cpu: Acme 1000
    cores: 16
  measured:
    date: '2026-11-30'
    torch_version: 2.11.0
    ranks: 2
    threads_per_rank: 8
    source_dtype: float32
    destination_dtype: bfloat16
  copies:
  - strategy: pinned_staged
    settings:
      chunk_elements: 16777216
    times:
    - {elements: 1048576, copy_seconds: 7.9e-05, submit_seconds: 6.0e-05, total_seconds: 8.1e-05}
    - {elements: 16777216, copy_seconds: 0.000306, submit_seconds: 0.0002, total_seconds: 0.000311}
  not_measured:
    pinned_direct: It cannot.
  optimizer:
    name: Adam
    updates:
    - {elements: 1048576, seconds: 0.0006}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No test reads or writes the profile of the user who runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("H2D_PROFILE", raising=False)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def this_machine(monkeypatch):
    """This machine as the file above describes one."""
    monkeypatch.setattr("transfer.measured.profile.cpu_model", lambda: "Acme 1000")
    monkeypatch.setattr("transfer.measured.profile.cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return SimulatedAccelerator()


def test_read(file):
    profile = MachineProfile.load(file)
    assert profile.machine.cpu == "Acme 1000"
    (staged,) = profile.copies
    assert (staged.strategy, staged.settings) == ("pinned_staged", {"chunk_elements": 2**24})
    assert [one.elements for one in staged.times] == [2**20, 2**24]
    assert staged.times[1].copy_seconds == 0.000306
    assert profile.not_measured == {"pinned_direct": "It cannot."}
    assert profile.measured.destination_dtype is torch.bfloat16
    assert profile.drive is None


def test_round_trips(file, tmp_path):
    profile = MachineProfile.load(file)
    assert profile.save(tmp_path / "new" / "again.yaml") == str(tmp_path / "new" / "again.yaml")
    again = MachineProfile.load(tmp_path / "new" / "again.yaml")
    assert again == profile
    assert hash(again) == hash(profile)
    assert pickle.loads(pickle.dumps(profile)) == profile


def test_what_is_written_is_readable(file):
    MachineProfile.load(file).save(file)
    text = file.read_text()
    assert text.startswith("# How fast this machine moves values")
    assert "`h2d tune`" in text.partition("machine_profile:")[0]
    measurement = "{elements: 1048576, copy_seconds: 7.9e-05, submit_seconds: 6.0e-05, total_seconds: 8.1e-05}"
    assert f"    times:\n    - {measurement}\n" in text


def test_frozen(file):
    with pytest.raises(ValueError, match="frozen"):
        MachineProfile.load(file).copies = ()


def test_where_it_is_looked_for(file, tmp_path, monkeypatch):
    assert default_path() == tmp_path / "cache" / "host-to-device-transfer" / "profile.yaml"
    assert MachineProfile.load() is None
    profile = MachineProfile.load(file)
    assert profile.save() == str(default_path())
    assert MachineProfile.load() == profile
    monkeypatch.setenv("H2D_PROFILE", str(tmp_path / "named.yaml"))
    with pytest.raises(ConfigFileNotFoundError) as caught:
        MachineProfile.load()
    assert str(caught.value) == (
        f"{tmp_path}/named.yaml: no such machine profile ($H2D_PROFILE names it); `h2d tune` writes one"
    )
    assert profile.save() == str(tmp_path / "named.yaml")
    assert MachineProfile.load() == profile


@pytest.mark.parametrize("value", ["", "not/absolute"])
def test_the_default_without_a_usable_cache_folder(value, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "host-to-device-transfer" / "profile.yaml"


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        (
            "copy_seconds: 7.9e-05",
            "copy_seconds: -1",
            ":20: machine_profile.copies[0].times[0].copy_seconds: found -1 (int): expected a number above 0, such as",
        ),
        ("0.000306", "true", ":21: machine_profile.copies[0].times[1].copy_seconds: found True (bool): expected a"),
        ("0.000306", ".inf", ":21: machine_profile.copies[0].times[1].copy_seconds: found inf (float): expected a"),
        ("0.000306", "fast", ":21: machine_profile.copies[0].times[1].copy_seconds: found 'fast' (str): expected a"),
        (
            "updates:\n    - {elements: 1048576, seconds: 0.0006}",
            "updates: []",
            ":26: machine_profile.optimizer.updates: found [] (list): expected at least one",
        ),
        ("cores: 16", "cores: 16.5", ":7: machine_profile.machine.cores: found 16.5 (float): expected a whole number"),
        ("cores: 16", "cors: 16", ":7: machine_profile.machine.cors: unknown key 'cors'. Did you mean 'cores'?"),
        ("cores: 16", "cores: 16\n    cores: 8", ":8: machine_profile.machine.cores: duplicate key; first on line 7"),
        ("    ranks: 2\n", "", ":8: machine_profile.measured.ranks: this key is required"),
        ("cpu: Acme 1000", "cpu: 1000", ":6: machine_profile.machine.cpu: found 1000 (int): expected text"),
        (
            "format_version: 2",
            "format_version: 1",
            ":2: machine_profile.format_version: found 1 (int): this version reads format 2; run `h2d tune` again",
        ),
        ("  format_version: 2\n", "", ":1: machine_profile.format_version: found nothing: this version reads"),
        ("machine_profile:", "transfer:", ":1: this is no machine profile: expected one top-level key"),
        ("  copies:", "  copies: [", ":16: this is not YAML"),
    ],
)
def test_mistakes_have_a_place(file, right, wrong, complaint):
    assert right in TEXT
    file.write_text(TEXT.replace(right, wrong))
    with pytest.raises(ConfigError) as caught:
        MachineProfile.load(file)
    assert f"{file}{complaint}" in str(caught.value)


def test_the_sizes_must_rise(file):
    file.write_text(TEXT.replace("{elements: 16777216", "{elements: 1048576"))
    with pytest.raises(ConfigError) as caught:
        MachineProfile.load(file)
    assert str(caught.value).startswith(f"{file}:19: machine_profile.copies[0].times: found ")
    assert str(caught.value).endswith("the sizes must rise, and they are [1048576, 1048576]")


@pytest.mark.parametrize("text", ["", "[]", "machine_profile:\n", "machine_profile: 3\n"])
def test_files_that_are_no_profile(file, text):
    file.write_text(text)
    with pytest.raises(ConfigError, match="this is no machine profile"):
        MachineProfile.load(file)


def test_hand_written_values(file):
    file.write_text(TEXT.replace("7.9e-05", "7.9e-5").replace("0.000306", "3e-4").replace("'2026-11-30'", "2026-11-30"))
    profile = MachineProfile.load(file)
    assert [one.copy_seconds for one in profile.copies[0].times] == [7.9e-5, 3e-4]
    assert profile.measured.date == "2026-11-30"


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigFileError, match="cannot be read"):
        MachineProfile.load(tmp_path)
    with pytest.raises(ConfigFileNotFoundError, match="no such machine profile; `h2d tune` writes one"):
        MachineProfile.load(tmp_path / "absent.yaml")


def test_a_file_that_cannot_be_written(file, tmp_path):
    profile = MachineProfile.load(file)
    with pytest.raises(ConfigFileError, match="cannot be written"):
        profile.save(file / "below" / "a file")
    with pytest.raises(ConfigFileError, match="cannot be written"):
        profile.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.yaml"]


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_written_whole_or_not_at_all(file, monkeypatch, failure):
    profile = MachineProfile.load(file)

    def fsync(_descriptor):
        raise failure

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ConfigFileError if isinstance(failure, OSError) else KeyboardInterrupt):
        profile.save(file)
    assert file.read_text() == TEXT
    assert [path.name for path in file.parent.iterdir()] == ["profile.yaml"]


def test_a_link_stays_one(file, tmp_path):
    (tmp_path / "link.yaml").symlink_to(file)
    MachineProfile.load(file).save(tmp_path / "link.yaml")
    assert (tmp_path / "link.yaml").is_symlink()
    assert file.read_text().startswith("#")


def test_a_link_that_waits_for_the_temporary_file_is_not_followed(file, tmp_path):
    """In a folder where others may write, who can guess the name."""
    (tmp_path / "mine").write_text("mine")
    target = tmp_path / "shared" / "profile.yaml"
    target.parent.mkdir()
    (target.parent / f".profile.yaml.{os.getpid()}").symlink_to(tmp_path / "mine")
    MachineProfile.load(file).save(target)
    assert (tmp_path / "mine").read_text() == "mine"
    assert MachineProfile.load(target) == MachineProfile.load(file)
    assert [path.name for path in target.parent.iterdir()] == ["profile.yaml"]


def test_of_this_machine(file, this_machine):
    assert MachineProfile.load(file).mismatch(this_machine) is None


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ("accelerator: simulated", "accelerator: cuda", "its accelerator is 'cuda', here it is 'simulated'"),
        ("device: simulated", "device: NVIDIA H200", "its device is 'NVIDIA H200', here it is 'simulated'"),
        ("cpu: Acme 1000", "cpu: Acme 2000", "its cpu is 'Acme 2000', here it is 'Acme 1000'"),
        ("cores: 16", "cores: 32", "its number of cores is 32, here it is 16"),
    ],
)
def test_of_another_machine(file, this_machine, right, wrong, sentence):
    file.write_text(TEXT.replace(right, wrong))
    assert sentence in MachineProfile.load(file).mismatch(this_machine)


@pytest.mark.parametrize(
    ("ranks", "threads", "sentence"),
    [
        ("3", 12, None),  # within a factor of 1.5
        ("4", 8, "with 2 ranks on this host, and this process has 4; `h2d tune --ranks 4 --threads 8` measures what"),
        ("1", 8, "with 2 ranks on this host, and this process has 1"),
        ("", 8, "with 2 ranks on this host, and this process has 1"),  # no launcher
        ("2", 1, "with 8 host threads a rank, and this process has 1; `h2d tune --ranks 2 --threads 1` measures what"),
        ("2", 13, "with 8 host threads a rank, and this process has 13"),
    ],
)
def test_of_another_load(file, this_machine, monkeypatch, ranks, threads, sentence):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = MachineProfile.load(file).mismatch(this_machine)
    assert found is None if sentence is None else sentence in found


def test_ranks_that_deepspeed_started(file, this_machine, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert MachineProfile.load(file).mismatch(this_machine) is None


def test_names_of_hardware(monkeypatch):
    simulated = SimulatedAccelerator()
    assert hardware.device_name(simulated) == "simulated"
    runtime = type("Runtime", (), {"get_device_name": staticmethod(lambda: "Acme GPU 7")})
    monkeypatch.setattr(torch, "simulated", runtime, raising=False)
    assert hardware.device_name(simulated) == "Acme GPU 7"

    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(runtime, "get_device_name", staticmethod(broken))
    assert hardware.device_name(simulated) == "simulated"
    assert hardware.cpu_model().strip()
    assert hardware.cores() >= 1


def test_the_cpu_without_proc(monkeypatch):
    monkeypatch.setattr(hardware, "Path", lambda _name: textwrap)  # has no read_text
    monkeypatch.setattr(textwrap, "read_text", lambda **_how: "processor: 0\n", raising=False)
    monkeypatch.setattr("accelerators.hardware.platform.processor", lambda: "")
    monkeypatch.setattr("accelerators.hardware.platform.machine", lambda: "riscv64")
    assert hardware.cpu_model.__wrapped__() == "riscv64"
