"""`h2d tune` on accelerators without hardware: what is written and told, and that nothing stays pinned."""

import json
import os

import pytest
import torch

from accelerators import get_accelerator
from accelerators.simulated.accelerator import SimulatedAccelerator
from accelerators.testing import failing
from tests.running import run_python
from transfer import load_config
from transfer.cli.measuring.ranks import Ranks
from transfer.cli.tune import command as tune
from transfer.cli.tune import measure as tune_measure
from transfer.cli.tune import report as tune_report
from transfer.cli.tune import worker as tune_worker
from transfer.measured.profile import MachineProfile
from transfer.measured.profile_file import default_path

TINY = ["--accelerator", "simulated", "--largest-chunk", "2048", "--quick"]
CHUNKS = [8, 32, 128, 256, 512, 1024, 2048]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No test writes the profile of whoever runs it, nor changes the threads of the next test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("H2D_PROFILE", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def worker(monkeypatch):
    """Runs the worker on an accelerator that a test has made."""

    def run(accelerator):
        monkeypatch.setattr(tune_worker, "get_accelerator", lambda _name: accelerator)
        options = {"accelerator": None, "rounds": 1, "largest_chunk": 2048, "nvme": None, "drive_bounds": {}}
        fields = tune_worker.run(options, Ranks())
        return MachineProfile.model_validate(fields)

    return run


def test_writes_the_profile(tmp_path, capsys):
    file = tmp_path / "profile.yaml"
    assert tune.main([*TINY, "--threads", "1", "--output", str(file)]) == 0
    profile = MachineProfile.load(file)
    assert [entry.chunk_bytes for entry in profile.wire] == [2 * chunk for chunk in CHUNKS]
    assert [entry.chunk_elements for entry in profile.host_cast] == CHUNKS
    assert [entry.elements for entry in profile.pageable] == [32, 2048]
    assert (profile.measured.ranks, profile.measured.threads_per_rank) == (1, 1)
    assert profile.lacks == {}
    assert profile.page_lock_seconds_per_gib is not None
    assert profile.mismatch(get_accelerator("simulated")) is None
    assert get_accelerator("simulated").pinned_bytes == 0
    out, err = capsys.readouterr()
    assert f"Written to {file}" in out
    assert err == ""  # no progress where nobody looks


def test_tells_a_configuration_that_can_be_loaded(tmp_path, capsys, monkeypatch):
    assert tune.main(TINY) == 0
    assert default_path().exists()
    out = capsys.readouterr().out
    text = out[out.index("transfer:") : out.index("\nWritten to")]
    assert "  strategy: measured\n  pinned_staged: {chunk_elements: " in text
    (tmp_path / "h2d.yaml").write_text(text)
    config = load_config(tmp_path / "h2d.yaml")
    assert config.strategy == "measured"
    assert config.section("pinned_staged").chunk_elements in CHUNKS
    assert config.section("pinned_direct").chunk_elements in CHUNKS


def test_json(capsys):
    assert tune.main([*TINY, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(default_path())
    profile = MachineProfile.load()
    assert MachineProfile.model_validate(told["profile"]) == profile
    assert [(row["elements"], row["completion"]) for row in told["choices"]] == [
        (elements, completion) for elements in (2**20, 2**24, 2**28) for completion in ("immediate", "deferred")
    ]
    for row in told["choices"]:
        assert f"{row['elements']} elements" in row["reason"]
        assert all(name in row["reason"] for name in ("pageable", "pinned_staged", "pinned_direct"))
    assert told["best_rings"].keys() == {"pinned_staged", "pinned_direct"}


def test_two_ranks_at_once(tmp_path):
    file = tmp_path / "profile.yaml"
    arguments = ["-m", "transfer.cli", "tune", *TINY, "--ranks", "2", "--threads", "1", "--output", file]
    done = run_python(*arguments, environment={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    measured = MachineProfile.load(file).measured
    assert (measured.ranks, measured.threads_per_rank) == (2, 1)


def test_nothing_to_tune_on_the_host_itself(capsys):
    assert tune.main(["--accelerator", "cpu"]) == 0
    assert capsys.readouterr().out == (
        "Nothing to tune on cpu: every copy is `pageable`. The CPU accelerator computes in host memory, so there is "
        "no device to pin it for.\n"
    )
    assert tune.main(["--accelerator", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] is None
    assert not default_path().exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [([*TINY, "--output", "/proc/place.yaml"], "cannot be written"), (["--accelerator", "xpu"], "xpu")],
)
def test_failures_are_told(arguments, complaint, capsys):
    assert tune.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("h2d tune: ")
    assert complaint in err


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (["--ranks", "0"], "expected a whole number"),
        (["--largest-chunk", "2^28"], "expected from 1024 to 134217728"),
        (["--largest-chunk", "1023"], "expected from 1024 to 134217728"),
        (["--accelerator", "simulatd"], "Did you mean 'simulated'?"),
        (["--output", "/nowhere/profile.yaml"], "there is no directory /nowhere"),
    ],
)
def test_wrong_arguments(wrong, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        tune.main([*TINY, *wrong])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_memory_that_cannot_be_page_locked_in_place(worker, simulated):
    with failing(simulated, "register_host_memory", RuntimeError("locked memory is used up")):
        profile = worker(simulated)
    assert profile.page_lock_seconds_per_gib is None
    assert profile.lacks == {
        "registers_host_memory": "Page-locking 16384 bytes in place failed: locked memory is used up."
    }
    assert profile.wire
    assert "pinned_direct" not in tune_report.best_rings(profile)
    assert simulated.pinned_bytes == 0


def test_memory_that_cannot_be_pinned_at_all(worker):
    simulated = SimulatedAccelerator(pin_limit_bytes=1000)
    profile = worker(simulated)
    assert profile.lacks["pins_host_memory"].startswith("Pinning 4096 bytes failed: cannot pin 4096 bytes")
    assert profile.wire == profile.host_cast == ()
    assert tune_report.best_rings(profile) == {}
    assert {row["strategy"] for row in tune_report.choices(profile)} == {"pageable"}


def test_without_events(worker):
    profile = worker(SimulatedAccelerator(events=False))
    assert profile.lacks == {"events": "This simulated accelerator was made without events."}
    assert profile.staged_chunk_seconds is None
    assert profile.wire


def test_without_streams(worker):
    profile = worker(SimulatedAccelerator(streams=False))
    assert profile.lacks == {"streams": "This simulated accelerator was made without streams."}
    assert tune_report.best_rings(profile).keys() == {"pinned_staged"}


@pytest.mark.parametrize("after", [0, 5, 40, 400])
def test_nothing_stays_pinned_after_a_failure(worker, simulated, after):
    with (
        failing(simulated, "enqueue_copy", RuntimeError("lost"), after=after),
        pytest.raises(RuntimeError, match="lost"),
    ):
        worker(simulated)
    assert simulated.pinned_bytes == 0


def test_nothing_stays_page_locked_after_an_interrupt(simulated):
    bench = tune_measure.Bench(simulated, Ranks(), 1, 1024)
    with (
        failing(simulated, "unregister_host_memory", KeyboardInterrupt(), after=1),
        pytest.raises(KeyboardInterrupt),
    ):
        tune_measure.page_lock(bench, torch.ones(1024))
    assert simulated.pinned_bytes == 0


def test_progress_on_a_terminal(worker, simulated, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    worker(simulated)
    out, err = capsys.readouterr()
    assert out == ""
    assert "measuring" in err


def test_the_slowest_rank_counts_and_then_the_median():
    class Three(Ranks):
        def gather(self, value):
            return [[1.0, 9.0, 2.0], [3.0, 4.0, 8.0], [0.5, 0.5, 0.5]]

    bench = tune_measure.Bench(SimulatedAccelerator(), Three(), 3, 1024)
    assert bench.seconds(lambda: None) == 8.0  # of 3, 9 and 8


def test_a_refusal_on_another_rank_is_ours_too():
    class Two(Ranks):
        def gather(self, value):
            return [value, "rank 1 has no memory left"]

    simulated = SimulatedAccelerator()
    bench = tune_measure.Bench(simulated, Two(), 1, 1024)
    with pytest.raises(tune_measure.PinningRefusedError, match="rank 1 has no memory left"), bench.pinned(1024):
        pass
    assert simulated.pinned_bytes == 0


def test_what_is_timed_is_the_work_alone():
    calls = []
    bench = tune_measure.Bench(SimulatedAccelerator(), Ranks(), 2, 1024)
    seconds = bench.seconds(lambda: calls.append("work"), lambda: calls.append("settle") or torch.ones(10**6).sum())
    assert calls == ["work", "settle"] * 3
    assert seconds < 1e-3


def test_larger_chunks_only_where_they_pay():
    """Chunks of 2^20 cost 1% more than those of 2^24, which pin 16 times as much."""
    profile = MachineProfile(
        machine={"accelerator": "simulated", "device": "simulated", "cpu": "Acme", "cores": 1},
        measured={"date": "2026-11-30", "torch_version": "2", "ranks": 1, "threads_per_rank": 1},
        wire=[{"chunk_bytes": 2**21, "seconds": 1e-4}],
        host_cast=[
            {"chunk_elements": 2**18, "elements_per_second": 0.5e9},
            {"chunk_elements": 2**20, "elements_per_second": 1e9},
            {"chunk_elements": 2**24, "elements_per_second": 1.01e9},
        ],
        pageable=[{"elements": 1, "seconds": 1}],
        host_update_elements_per_second=1e9,
    )
    assert tune_report.best_rings(profile) == {"pinned_staged": tune_report.Ring(2**20, 2)}
