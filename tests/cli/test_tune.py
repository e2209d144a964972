"""`h2d tune` on accelerators without hardware: what is written and told, and that nothing stays pinned."""

import itertools
import json

import pytest
import torch

from accelerators import get_accelerator
from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import failing
from transfer import MachineProfile, PageableTransfer, cli, load_config
from transfer.cli.measuring.copies import Case, Variant, refusal
from transfer.cli.measuring.ranks import Ranks, RanksFailedError
from transfer.cli.tune import command as tune
from transfer.cli.tune import report as tune_report
from transfer.cli.tune import worker as tune_worker
from transfer.errors import StrategyUnavailableError
from transfer.measured.profile_file import default_path

SMALL_RINGS = "transfer: {pinned_staged: {chunk_elements: 1000}, pinned_direct: {chunk_elements: 2000, buffers: 3}}"
FIELDS = ("copy_seconds", "submit_seconds", "total_seconds")
NAMES = ["pinned_direct", "pinned_staged", "pageable"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No test writes the profile of the user who runs it, nor changes the threads of the next test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("H2D_PROFILE", raising=False)
    (tmp_path / "rings.yaml").write_text(SMALL_RINGS)
    monkeypatch.setenv("H2D_CONFIG", str(tmp_path / "rings.yaml"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


TINY = ["--accelerator", "simulated", "--elements", "500", "5000", "--quick"]


@pytest.fixture
def worker(monkeypatch):
    """Runs the worker on an accelerator that a test has made."""

    def run(accelerator, ranks=Ranks(), **options):  # noqa: B008 - keeps nothing
        given = {"accelerator": accelerator, "config": None, "elements": [500, 5000], "quick": True, "nvme": None}
        return MachineProfile.model_validate(tune_worker.run({**given, **options}, ranks))

    return run


@pytest.mark.slow
def test_writes_the_profile(tmp_path, capsys):
    file = tmp_path / "profile.yaml"
    assert cli.main(["tune", *TINY, "--threads", "1", "--output", str(file)]) == 0
    profile = MachineProfile.load(file)
    assert [entry.strategy for entry in profile.copies] == NAMES
    assert [entry.settings.get("chunk_elements") for entry in profile.copies] == [2000, 1000, None]
    assert profile.copies[0].settings["buffers"] == 3
    for entry in profile.copies:
        assert [one.elements for one in entry.times] == [500, 5000]
        assert all(one.submit_seconds <= one.total_seconds for one in entry.times)
    assert profile.not_measured == {}
    assert [one.elements for one in profile.optimizer.updates] == [5000]
    assert (profile.measured.ranks, profile.measured.threads_per_rank) == (1, 1)
    assert profile.mismatch(get_accelerator("simulated")) is None
    assert get_accelerator("simulated").pinned_bytes == 0
    out, err = capsys.readouterr()
    assert f"Written to {file}" in out
    assert max(map(len, out.partition("immediate:")[0].splitlines()[1:])) <= 80
    assert err == ""  # no progress without a terminal


def test_tells_a_configuration_that_can_be_loaded(tmp_path, capsys):
    assert cli.main(["tune", *TINY]) == 0
    assert default_path().exists()
    out = capsys.readouterr().out
    text = out[out.index("transfer:") : out.index("\nWritten to")]
    (tmp_path / "h2d.yaml").write_text(text)
    config = load_config(tmp_path / "h2d.yaml")
    assert config.strategy == "measured"
    assert config.section("pinned_staged").chunk_elements == 1000
    assert config.section("pinned_direct").buffers == 3


def test_json(capsys):
    assert cli.main(["tune", *TINY, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["file"] == str(default_path())
    assert MachineProfile.model_validate(reported["profile"]) == MachineProfile.load()
    assert [(row["elements"], row["completion"]) for row in reported["choices"]] == [
        (elements, completion) for elements in (2**20, 2**24, 2**28) for completion in ("immediate", "deferred")
    ]
    for row in reported["choices"]:
        assert row["strategy"] in NAMES
        assert f"{row['elements']} elements" in row["reason"]
        assert all(name in row["reason"] for name in NAMES)
        assert "was measured with" not in row["reason"]
    assert set(reported["best"]) == set(NAMES)


def test_other_chunks_are_tried_where_copies_are_large_enough(worker, simulated, monkeypatch):
    monkeypatch.setattr(tune_worker, "CHUNKS", (300, 2000, 6000))
    found = [(entry.strategy, entry.settings.get("chunk_elements")) for entry in worker(simulated).copies]
    assert found == [
        *[("pinned_direct", chunk) for chunk in (2000, 300)],
        *[("pinned_staged", chunk) for chunk in (1000, 300, 2000)],
        ("pageable", None),
    ]


def test_two_ranks_at_once(worker, simulated, monkeypatch):
    """The other rank is ten times as slow; how ranks are started is the same for every command (test_bench.py)."""

    class Two(Ranks):
        def barrier(self):
            pass

        def gather(self, value):
            return [value, [10 * seconds for seconds in value] if isinstance(value, list) else value]

    clock = itertools.count()
    monkeypatch.setattr("transfer.cli.measuring.copies.time.perf_counter", lambda: float(next(clock)))
    profile = worker(simulated, ranks=Two(size=2))
    assert profile.measured.ranks == 2
    # A whole number of seconds on this rank, as the clock says, and ten times as many on the other.
    seconds = {getattr(one, field) for entry in profile.copies for one in entry.times for field in FIELDS}
    assert all(value >= 10 and value % 10 == 0 for value in seconds)


def test_ranks_and_threads_reach_the_launch(monkeypatch, capsys):
    def launch(worker, given, ranks, *, threads):
        assert (worker, ranks, threads) == ("transfer.cli.tune.worker:run", 2, 3)
        assert given["elements"] == [500, 5000]
        raise RanksFailedError("not really")

    monkeypatch.setattr(tune, "launch", launch)
    assert cli.main(["tune", *TINY, "--ranks", "2", "--threads", "3", "--elements", "5000", "500", "500"]) == 1
    assert capsys.readouterr().err == "h2d tune: not really\n"


def test_nothing_to_tune_on_the_host_itself(capsys):
    assert cli.main(["tune", "--accelerator", "cpu"]) == 0
    assert capsys.readouterr().out == (
        "Nothing to tune on cpu: every copy is `pageable`. The CPU accelerator computes in host memory, so there is "
        "no device to pin it for.\n"
    )
    assert cli.main(["tune", "--accelerator", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] is None
    assert not default_path().exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [([*TINY, "--output", "/proc/place.yaml"], "cannot be written"), (["--accelerator", "xpu"], "xpu")],
)
def test_failures_are_told(arguments, complaint, capsys):
    assert cli.main(["tune", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("h2d tune: ")
    assert complaint in err


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (["--ranks", "0"], "expected a whole number"),
        (["--elements", "0"], "expected a whole number"),
        (["--accelerator", "simulatd"], "Did you mean 'simulated'?"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--output", "/nowhere/profile.yaml"], "there is no directory /nowhere"),
    ],
)
def test_wrong_arguments(wrong, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", *TINY, *wrong])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_memory_that_cannot_be_page_locked_in_place(worker, simulated):
    with failing(simulated, "register_host_memory", RuntimeError("locked memory is used up")):
        profile = worker(simulated)
    assert "locked memory is used up" in profile.not_measured["pinned_direct"]
    assert [entry.strategy for entry in profile.copies] == NAMES[1:]
    assert "pinned_direct" not in tune_report.best_settings(profile)
    assert simulated.pinned_bytes == 0


def test_memory_that_cannot_be_pinned_at_all(worker):
    simulated = SimulatedAccelerator(pin_limit_bytes=1000)
    profile = worker(simulated)
    assert set(profile.not_measured) == {"pinned_direct", "pinned_staged"}
    assert {row["strategy"] for row in tune_report.choices(profile)} == {"pageable"}
    assert simulated.pinned_bytes == 0


def test_a_size_that_is_refused_takes_the_configuration_out(worker):
    profile = worker(SimulatedAccelerator(pin_limit_bytes=10_000))
    assert "pinned_direct" in profile.not_measured  # 500 elements are 2,000 bytes, 5,000 are 20,000
    assert [entry.strategy for entry in profile.copies] == NAMES[1:]


def test_a_strategy_that_leaves_wrong_bits_is_not_measured(worker, simulated, monkeypatch):
    submit = PageableTransfer._submit

    def wrong(self, destination, source, *given, **how):
        copy = submit(self, destination, source, *given, **how)
        destination[-1:].neg_()
        return copy

    monkeypatch.setattr(PageableTransfer, "_submit", wrong)
    assert worker(simulated).not_measured == {"pageable": "It left wrong bits."}


@pytest.mark.parametrize("after", [0, 5, 40])
def test_nothing_stays_pinned_after_a_failure(worker, simulated, after):
    with (
        failing(simulated, "enqueue_copy", RuntimeError("lost"), after=after),
        pytest.raises(RuntimeError, match="lost"),
    ):
        worker(simulated)
    assert simulated.pinned_bytes == 0


def test_progress_on_a_terminal(worker, simulated, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    worker(simulated)
    out, err = capsys.readouterr()
    assert out == ""
    assert "pinned_staged, 5,000 elements" in err


def test_the_slowest_rank_counts_and_then_the_median():
    class Three(Ranks):
        def gather(self, value):
            return [[1.0, 9.0, 2.0], [3.0, 4.0, 8.0], [0.5, 0.5, 0.5]]

    assert tune_worker._median(Three(), []) == 8.0  # of 3, 9 and 8


def test_a_refusal_on_another_rank_is_ours_too():
    class Two(Ranks):
        def gather(self, value):
            return [value, "rank 1 has no memory left"]

    assert refusal(Two(), lambda: None) == "rank 1 has no memory left"

    def refuse():
        raise StrategyUnavailableError("not here")

    assert refusal(Two(), refuse) == "not here"


def test_submit_is_timed_apart_from_the_wait(simulated, monkeypatch):
    """The clock counts the calls of ``submit`` and ``wait``, and each takes what the test says."""
    import transfer.cli.measuring.copies as copies

    now = [0.0]
    monkeypatch.setattr(copies.time, "perf_counter", lambda: now[0])
    case = Case.of(simulated, Ranks(), 10, torch.bfloat16)
    transfer = PageableTransfer(accelerator=simulated)

    class Slow:
        def wait(self):
            now[0] += 5.0

    def submit(destination, source):
        now[0] += 2.0
        return Slow()

    monkeypatch.setattr(transfer, "submit", submit)
    assert case.submitted(Variant("slow", "strategy", transfer, case.source)) == (2.0, 7.0)


def test_larger_chunks_only_where_they_pay():
    """Chunks of 2^20 cost 1% more than those of 2^24, which pin 16 times as much."""

    def timed(chunk, seconds):
        times = {"elements": 2**26, "copy_seconds": seconds, "submit_seconds": seconds, "total_seconds": seconds}
        return {"strategy": "pinned_staged", "settings": {"chunk_elements": chunk, "buffers": 2}, "times": [times]}

    profile = MachineProfile(
        machine={"accelerator": "simulated", "device": "simulated", "cpu": "Acme", "cores": 1},
        measured={"date": "2026-11-30", "torch_version": "2", "ranks": 1, "threads_per_rank": 1},
        copies=[timed(2**24, 1.0), timed(2**18, 2.0), timed(2**20, 1.01)],
    )
    assert tune_report.best_settings(profile) == {"pinned_staged": {"chunk_elements": 2**20, "buffers": 2}}
