"""`h2d tune --nvme`: what is measured of a drive, what the profile keeps of it, and that no file stays."""

import errno
import json
import os

import pytest
import torch

from transfer import MachineProfile, SwapError, cli, load_config
from transfer.cli.measuring.ranks import Ranks
from transfer.cli.tune import drive as tune_drive
from transfer.cli.tune import report as tune_report
from transfer.cli.tune.drive import MIXED_REQUESTS, MIXED_THREADS, REQUESTS, THREADS, Bounds, measure_drive
from transfer.measured.profile import Drive
from transfer.nvme.mounts import file_system

pytestmark = pytest.mark.slow

TINY = ["--accelerator", "simulated", "--elements", "1000", "--quick"]
SMALL = Bounds(file_bytes=2**16, cell_seconds=0.001)
MIXED = [(request_bytes, threads) for request_bytes in MIXED_REQUESTS for threads in MIXED_THREADS]
CELLS = [(request_bytes, threads) for request_bytes in REQUESTS for threads in THREADS]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No test writes the profile of the user who runs it, measures for long, or changes the threads of the next one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("H2D_PROFILE", raising=False)
    (tmp_path / "rings.yaml").write_text("transfer: {pinned_staged: {chunk_elements: 1000}}")
    monkeypatch.setenv("H2D_CONFIG", str(tmp_path / "rings.yaml"))
    monkeypatch.setattr("transfer.cli.tune.worker.Bounds", lambda **given: SMALL)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def files_in(directory):
    return list(directory.rglob("*tune*"))


def test_every_combination_is_measured_and_kept(tmp_path, capsys):
    file, directory = tmp_path / "profile.yaml", tmp_path / "drive"
    assert cli.main(["tune", *TINY, "--output", str(file), "--nvme", str(directory)]) == 0
    drive = MachineProfile.load(file).drive
    assert drive.file_system == file_system(directory)
    assert [(one.request_bytes, one.threads) for one in drive.rates] == CELLS
    assert {drive.best_read, drive.best_write} <= set(drive.rates)
    assert [(one.request_bytes, one.threads) for one in drive.mixed] == MIXED
    assert drive.best_mixed in drive.mixed
    assert not files_in(directory)
    out = capsys.readouterr().out
    assert f"GB/s of each rank, read on {drive.file_system}" in out
    assert "Best read: " in out
    assert "Best of both at once: " in out
    text = out[out.index("transfer:") : out.index("\nWritten to")]
    (tmp_path / "h2d.yaml").write_text(text)
    section = load_config(tmp_path / "h2d.yaml").section("nvme_swapped")
    assert (section.threads, section.request_bytes) == (drive.best_read.threads, drive.best_read.request_bytes)


def test_nothing_of_drives_without_being_asked(capsys, monkeypatch):
    monkeypatch.setattr("transfer.cli.tune.worker.measure_drive", lambda *_given: pytest.fail("measured a drive"))
    assert cli.main(["tune", *TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"]["drive"] is None
    assert "nvme_swapped" not in tune_report.config_yaml(MachineProfile.load())


def test_where_o_direct_is_refused_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune_drive, "goes_past_the_cache", lambda _attempt: False)
    assert cli.main(["tune", *TINY, "--nvme", str(tmp_path)]) == 0
    assert MachineProfile.load().drive.direct is False
    out = " ".join(capsys.readouterr().out.split())
    assert "through the page cache, as O_DIRECT is refused: not the drive's own rates" in out


@pytest.mark.parametrize("refuses", ["open", "pwritev"])
def test_o_direct_is_refused_at_once_or_at_the_first_write(tmp_path, monkeypatch, refuses):
    real, direct = getattr(os, refuses), []

    def refusing(*given):
        asks = given[1] & os.O_DIRECT if refuses == "open" and len(given) > 1 else refuses == "pwritev" and not direct
        if asks:
            direct.append(given)
            raise OSError(errno.EINVAL, "no direct access here")
        return real(*given)

    monkeypatch.setattr(os, refuses, refusing)
    assert measure_drive(str(tmp_path), Ranks(), SMALL)["direct"] is False
    assert len(direct) == 1


@pytest.mark.parametrize("after", [0, 3, 12])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "the drive is broken"), KeyboardInterrupt()])
def test_the_file_goes_whatever_happens(tmp_path, monkeypatch, call, error, after):
    real, calls = getattr(os, call), []

    def failing(*given):
        calls.append(given)
        if len(calls) > after:
            raise error
        return real(*given)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(SwapError if isinstance(error, OSError) else KeyboardInterrupt):
        measure_drive(str(tmp_path), Ranks(), SMALL)
    assert len(calls) > after
    assert not files_in(tmp_path)


def test_a_directory_that_cannot_be_written_is_told(capsys):
    assert cli.main(["tune", *TINY, "--nvme", "/proc/nowhere"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("h2d tune: ")
    assert "/proc/nowhere" in printed.err


def test_a_host_without_a_device_is_told_what_was_left_out(capsys, tmp_path):
    assert cli.main(["tune", "--accelerator", "cpu", "--nvme", str(tmp_path)]) == 0
    assert "The drive was not measured either." in capsys.readouterr().out


def test_bytes_and_time_are_bounded(tmp_path, monkeypatch):
    moved = []
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, real=real: moved.append(real(*given)) or moved[-1])
    measure_drive(str(tmp_path), Ranks(), Bounds(file_bytes=2**23, cell_seconds=60))
    tried = 4096  # written to see whether O_DIRECT works
    assert sum(moved) <= tried + 2**23 * (1 + 2 * len(CELLS) + len(MIXED))
    moved.clear()
    measure_drive(str(tmp_path), Ranks(), Bounds(file_bytes=2**26, fill_seconds=0, cell_seconds=0))
    # One request of each thread, where there is so much; the file is filled by four threads.
    cells = sum(request_bytes * threads for request_bytes, threads in (*CELLS, *MIXED))
    assert sum(moved) <= tried + 4 * REQUESTS[-1] + 2 * cells


def test_the_slowest_rank_counts(tmp_path):
    class Two(Ranks):
        rates = ()

        def gather(self, value):
            if not isinstance(value, list):
                return [value]
            self.rates = value
            return [value, [one / 2 for one in value]]

    two = Two()
    drive = Drive.model_validate(measure_drive(str(tmp_path), two, SMALL))
    assert [one.written_bytes_per_second for one in drive.rates] == [rate / 2 for rate in two.rates[: len(CELLS)]]
    assert [one.read_bytes_per_second for one in drive.rates] == [
        rate / 2 for rate in two.rates[len(CELLS) :][: len(CELLS)]
    ]
    mixed = [(one.written_bytes_per_second, one.read_bytes_per_second) for one in drive.mixed]
    assert [each for pair in mixed for each in pair] == [rate / 2 for rate in two.rates[2 * len(CELLS) :]]


def test_more_threads_and_larger_requests_only_where_they_pay():
    def best(*rates):
        names = ("request_bytes", "threads", "read_bytes_per_second", "written_bytes_per_second")
        rates = [dict(zip(names, rate, strict=True)) for rate in rates]
        drive = Drive(file_system="xfs", direct=True, rates=rates)
        return [(one.request_bytes, one.threads) for one in (drive.best_read, drive.best_write)]

    assert best((1, 1, 50, 98), (2, 4, 99, 99), (1, 4, 98.5, 99), (1, 8, 100, 100)) == [(1, 4), (1, 1)]
    assert best((1, 1, 50, 100), (1, 8, 100, 50)) == [(1, 8), (1, 1)]


def test_of_both_at_once_the_slower_one_counts():
    names = ("request_bytes", "threads", "read_bytes_per_second", "written_bytes_per_second")
    rates = [
        dict(zip(names, rate, strict=True))
        for rate in ((1, 1, 99, 20), (2, 2, 60, 61), (2, 4, 60.5, 90), (1, 8, 61, 10))
    ]
    drive = Drive(file_system="xfs", direct=True, rates=rates[:1], mixed=rates)
    assert (drive.best_mixed.request_bytes, drive.best_mixed.threads) == (2, 2)
    assert Drive(file_system="xfs", direct=True, rates=rates).best_mixed is None


def test_both_at_once_write_and_read_other_halves_of_the_file(tmp_path, monkeypatch):
    seen = {"pwritev": set(), "preadv": set()}
    for name, offsets in seen.items():
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, real=real, offsets=offsets: offsets.add(given[2]) or real(*given))
    monkeypatch.setattr(tune_drive, "REQUESTS", (2**22,))
    monkeypatch.setattr(tune_drive, "THREADS", (1,))
    measure_drive(str(tmp_path), Ranks(), Bounds(file_bytes=2**24, cell_seconds=60))
    half = 2**23
    assert seen["preadv"] >= {2**20 * number for number in range(8)}
    assert {offset for offset in seen["pwritev"] if offset >= half} >= {half + 2**20 * number for number in range(8)}
