"""`h2d tune --nvme`: what is measured of a drive, what the profile keeps of it, and that no file stays."""

import errno
import json
import os

import pytest
import torch

from transfer import SwapError, load_config
from transfer.cli.measuring.ranks import Ranks
from transfer.cli.tune import command as tune
from transfer.cli.tune import drive as tune_drive
from transfer.cli.tune import report as tune_report
from transfer.cli.tune.drive import BLOCKS, THREADS, Bounds, best, measure_drive
from transfer.measured.profile import Drive, MachineProfile
from transfer.nvme.mounts import file_system

TINY = ["--accelerator", "simulated", "--largest-chunk", "2048", "--quick"]
SMALL = Bounds(file_bytes=2**16, cell_seconds=0.001)
CELLS = [(block_bytes, threads) for block_bytes in BLOCKS for threads in THREADS]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No test writes the profile of whoever runs it, measures for long, or changes the threads of the next test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("H2D_PROFILE", raising=False)
    worker_options = tune._worker_options
    monkeypatch.setattr(tune, "_worker_options", lambda given: {**worker_options(given), "drive_bounds": vars(SMALL)})
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def files_in(directory):
    return list(directory.rglob("*tune*"))


def test_every_combination_is_measured_and_kept(tmp_path, capsys):
    file, directory = tmp_path / "profile.yaml", tmp_path / "drive"
    assert tune.main([*TINY, "--output", str(file), "--nvme", str(directory)]) == 0
    drive = MachineProfile.load(file).drive
    assert drive.file_system == file_system(directory)
    for entries, fastest in ((drive.read, drive.best_read), (drive.write, drive.best_write)):
        assert [(entry.block_bytes, entry.threads) for entry in entries] == CELLS
        assert fastest in entries
    assert not files_in(directory)
    out = capsys.readouterr().out
    assert f"GB/s of each rank, read / written on {drive.file_system}" in out
    assert "Best read: " in out
    text = out[out.index("transfer:") : out.index("\nWritten to")]
    (tmp_path / "h2d.yaml").write_text(text)
    section = load_config(tmp_path / "h2d.yaml").section("nvme_swapped")
    assert (section.threads, section.request_bytes) == (drive.best_read.threads, drive.best_read.block_bytes)


def test_nothing_of_drives_without_being_asked(capsys, monkeypatch):
    monkeypatch.setattr("transfer.cli.tune.worker.measure_drive", lambda *_given: pytest.fail("measured a drive"))
    assert tune.main([*TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"]["drive"] is None
    assert "nvme_swapped" not in tune_report.config_yaml(MachineProfile.load())


def test_a_profile_of_before_is_still_read(tmp_path):
    file = tmp_path / "profile.yaml"
    assert tune.main([*TINY, "--output", str(file)]) == 0
    old = file.read_text().replace("  drive: null\n", "")
    assert old != file.read_text()
    file.write_text(old)
    assert MachineProfile.load(file).drive is None


def test_where_o_direct_is_refused_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune_drive, "_writes_directly", lambda _direct: False)
    assert tune.main([*TINY, "--nvme", str(tmp_path)]) == 0
    assert MachineProfile.load().drive.direct is False
    out = " ".join(capsys.readouterr().out.split())
    assert "through the page cache, as O_DIRECT is refused: not the drive's own rates" in out


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_o_direct_is_refused_at_once_or_at_the_first_write(tmp_path, monkeypatch, refuses):
    real = getattr(os, refuses)

    def refusing(*given):
        if refuses == "pwrite" or (len(given) > 1 and given[1] & os.O_DIRECT):
            raise OSError(errno.EINVAL, "no direct access here")
        return real(*given)

    monkeypatch.setattr(os, refuses, refusing)
    assert measure_drive(str(tmp_path), Ranks(), SMALL)["direct"] is False


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
    assert tune.main([*TINY, "--nvme", "/proc/nowhere"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("h2d tune: ")
    assert "/proc/nowhere" in printed.err


def test_a_host_without_a_device_is_told_what_was_left_out(capsys, tmp_path):
    assert tune.main(["--accelerator", "cpu", "--nvme", str(tmp_path)]) == 0
    assert "The drive was not measured either." in capsys.readouterr().out


def test_bytes_and_time_are_bounded(tmp_path, monkeypatch):
    moved = []
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, real=real: moved.append(real(*given)) or moved[-1])
    measure_drive(str(tmp_path), Ranks(), Bounds(file_bytes=2**23, cell_seconds=60))
    assert sum(moved) <= 2**23 * (1 + 2 * len(CELLS))
    moved.clear()
    measure_drive(str(tmp_path), Ranks(), Bounds(file_bytes=2**26, fill_seconds=0, cell_seconds=0))
    # One block of each thread, where there is so much; the file is filled by four threads.
    assert sum(moved) <= 4 * BLOCKS[-1] + 2 * sum(block_bytes * threads for block_bytes, threads in CELLS)


def test_the_slowest_rank_counts(tmp_path):
    class Two(Ranks):
        def gather(self, value):
            return [value, [one / 2 for one in value] if isinstance(value, list) else value]

    drive = Drive.model_validate(measure_drive(str(tmp_path), Two(), SMALL))
    assert len(drive.read) == len(CELLS)


def test_more_threads_and_larger_blocks_only_where_they_pay():
    def rate(block_bytes, threads, bytes_per_second):
        return {"block_bytes": block_bytes, "threads": threads, "bytes_per_second": bytes_per_second}

    assert best([rate(1, 1, 50), rate(2, 4, 99), rate(1, 4, 98.5), rate(1, 8, 100)]) == rate(1, 4, 98.5)
    assert best([rate(1, 1, 50), rate(1, 8, 100)]) == rate(1, 8, 100)
