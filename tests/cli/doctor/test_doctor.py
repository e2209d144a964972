"""``h2d doctor``: the whole report, and what must not be in it."""

import importlib.metadata
import json
import os
import re
import socket
from pathlib import Path

import pytest

from transfer import cli
from transfer.cli.doctor import software
from transfer.cli.doctor.command import main
from transfer.cli.doctor.finding import note, ok
from transfer.cli.doctor.private import without_names
from transfer.cli.measuring import cpu_adam


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder in which nothing hides this package, as the report looks there; no configuration, profile or lock."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("H2D_CONFIG", "H2D_PROFILE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr("accelerators.deepspeed_aio.unavailable_reason", lambda: "It is not built.")
    return tmp_path


def report(capsys, *arguments):
    status = cli.main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["command"], found["fit"]) == (1, "doctor", status == 0)
    return status, {one["name"]: one for one in found["findings"]}


def test_the_whole_report_on_a_simulated_accelerator(capsys, elsewhere):
    status, found = report(capsys, "--accelerator", "simulated", "--nvme", str(elsewhere))
    assert status == 0, [one for one in found.values() if one["status"] == "no"]
    assert "it tests bits, not speed" in found["accelerator"]["found"]
    assert "copies asynchronously" in found["capabilities"]["found"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*, whose step was read", found["DeepSpeed"]["found"])
    assert found["sites"]["status"] == "ok"
    assert found["profile"]["found"].startswith("none; only `strategy: measured` needs it")
    assert {"link", "NUMA", "ulimit -l", "host memory", "CPU Adam", "aio", "space", "O_DIRECT"} <= set(found)
    assert list(elsewhere.glob(".h2d-doctor-*")) == []
    for one in found.values():
        assert (one["status"] in ("ok", "unknown")) == (one["wanted"] is None) == (one["remedy"] is None), one


def test_without_an_accelerator_the_first_line_says_so_and_the_answer_is_no(capsys, monkeypatch):
    assert cli.main(["doctor", "--accelerator", "cpu"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[1:3] == ["accelerator", lines[2]]
    assert re.match(r"  NO +accelerator +none: DeepSpeed takes the CPU", lines[2])
    assert "Not fit: accelerator" in out
    assert max(map(len, lines)) <= 80
    assert err.startswith("Looking.")


def test_it_names_no_host_no_user_no_home_and_no_value_of_the_environment(capsys, elsewhere, monkeypatch):
    home = elsewhere / "people" / "jane.doe"
    home.mkdir(parents=True)
    (home / "drive").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "jane.doe")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.secret-lab.example")
    monkeypatch.setenv("H2D_CONFIG", str(home / "private.yaml"))
    (home / "private.yaml").write_text("transfer: {strategi: x}\n")
    (elsewhere / "extensions" / "cpu_adam").mkdir(parents=True)
    (elsewhere / "extensions" / "cpu_adam" / "lock").touch()
    (elsewhere / "work" / "transfer.py").touch()
    arguments = ("--accelerator", "simulated", "--nvme", str(home / "drive"))
    assert main(arguments) == 1
    text = capsys.readouterr().out
    for private in ("jane", "node17", "secret", "people", str(elsewhere), str(home), os.environ["H2D_CONFIG"]):
        assert private not in text, private
    assert "$H2D_CONFIG" in text
    assert "strategi" in text
    assert main([*arguments, "--full"]) == 1
    assert str(elsewhere / "extensions") in capsys.readouterr().out.replace("\n", "").replace(" ", "")


def test_names_are_taken_out_of_sentences(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setenv("LOGNAME", "jane")
    monkeypatch.setenv("SCRATCH", "/scratch/jane/x")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    text = "/home/jane/a.yaml of jane on node17, /scratch/jane/x/y, /home/bob/z, /opt/lib/file.so, generation 5 / x16"
    finding = without_names(note("a", text, "w", f"Delete {text}"), "/scratch/jane/x/y")
    assert finding.found == "~/a.yaml of <user> on <host>, <DIR>, ~/z, <path>/file.so, generation 5 / x16"
    assert finding.remedy == f"Delete {finding.found}"
    assert without_names(ok("a", "janet and node170")).found == "janet and node170"


def test_a_configuration_is_looked_at(capsys, elsewhere, monkeypatch):
    path = elsewhere / "ds.json"
    offload = {"device": "nvme"}
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": offload}}))
    status, found = report(capsys, "--accelerator", "simulated", "--config", str(path))
    assert status == 0
    assert "`aio.intra_op_parallelism` is 1" in found["aio"]["found"]
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "aio": {"intra_op_parallelism": 8}}))
    status, found = report(capsys, "--accelerator", "simulated", "--config", str(path))
    assert status == 1
    assert "only stage 3 is served" in found["served"]["found"]
    path.write_text('{"host_to_device_transfer": {"strategi": 1}}')
    assert cli.main(["doctor", "--config", str(path), "--accelerator", "simulated"]) == 1
    assert "Did you mean 'strategy'?" in " ".join(capsys.readouterr().out.split())
    named = elsewhere / "transfer.yaml"
    named.write_text("transfer: {accelerator: simulated}")
    status, found = report(capsys, "--config", str(named))
    assert status == 0
    assert "simulated" in found["accelerator"]["found"]


def test_a_package_on_the_module_path_alone_is_a_finding_and_no_failure(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    findings = {each.name: each for each in software.look()}
    assert findings["this package"].status == "note"
    assert findings["torch"].status == "ok"


def test_a_lock_that_a_build_left_and_a_file_that_hides_the_package(elsewhere, monkeypatch):
    folder = elsewhere / "extensions" / "cpu_adam"
    folder.mkdir(parents=True)
    assert software._locks(folder.parent).status == "ok"
    (folder / "lock").touch()
    left = software._locks(folder.parent)
    assert (left.status, left.found) == ("no", "left over by a build of: cpu_adam")
    assert "Delete `lock`" in left.remedy
    monkeypatch.setattr(cpu_adam, "is_compiling", lambda _folder: True)
    assert software._locks(folder.parent).status == "ok", "somebody compiles there"
    assert software._shadow().status == "ok"
    for hiding in (Path("transfer.py"), Path("transfer/__init__.py")):
        hiding.parent.mkdir(exist_ok=True)
        hiding.touch()
        assert software._shadow().status == "no"
        hiding.unlink()
    Path("transfer").rmdir()
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    (elsewhere / "accelerators.py").touch()
    assert "`accelerators`" in software._shadow().found


def test_a_look_that_fails_is_a_gap_and_not_the_end(capsys, monkeypatch):
    def failing():
        yield ok("first", "found")
        raise ValueError("no such thing")

    monkeypatch.setattr("transfer.cli.doctor.link.look", failing)
    status, found = report(capsys, "--accelerator", "simulated")
    assert (found["first"]["found"], found["look"]["found"]) == ("found", "failed: ValueError: no such thing")
    assert status == 0


def test_wrong_arguments(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--accelerator", "simulatd"])
    assert ended.value.code == 2
    assert "Did you mean 'simulated'?" in capsys.readouterr().err
