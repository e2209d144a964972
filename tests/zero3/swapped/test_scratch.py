"""DeepSpeed's folder of swap files is marked while a run uses it, and its files are spread over drives."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.running import run_python
from transfer import SwapError
from transfer.zero3.swapped import scratch


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "optimizer" / "rank0"
    folder.mkdir(parents=True)
    return folder


def marks(folder):
    return [each for each in folder.parent.iterdir() if each != folder]


def test_a_mark_says_that_files_are_scratch_and_goes_with_the_last_engine(folder):
    scratch.mark(folder)
    scratch.mark(folder)
    (mark,) = marks(folder)
    assert "load a checkpoint" in mark.read_text()
    assert list(folder.iterdir()) == [], "a checkpoint has a copy of the folder"
    scratch.unmark(folder)
    assert marks(folder) == [mark]
    scratch.unmark(folder)
    scratch.unmark(folder)
    assert marks(folder) == []


def test_another_process_cannot_use_the_same_files_until_this_one_has_ended(folder):
    scratch.mark(folder)
    code = f"from transfer.zero3.swapped import scratch; import pathlib; scratch.mark(pathlib.Path({str(folder)!r}))"
    other = run_python("-c", code)
    assert other.returncode != 0
    assert "another process uses these swap files" in other.stderr
    scratch.unmark(folder)
    killed = run_python("-c", code + "; import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -9
    assert len(marks(folder)) == 1, "what a killed run leaves stays marked"
    scratch.mark(folder)
    scratch.unmark(folder)


def test_a_forked_child_does_not_hold_the_mark(folder):
    scratch.mark(folder)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    try:
        scratch.unmark(folder)
        scratch.mark(folder)
        scratch.unmark(folder)
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)


def write(folder, numbers):
    paths = [folder / f"{number}.tensor.swp" for number in numbers]
    for number, path in zip(numbers, paths, strict=True):
        path.write_bytes(bytes([number]) * 1000)
    return list(map(str, paths))


def first(path):
    return Path(path).read_bytes()[0]


def test_files_are_spread_by_turns_and_found_where_they_were(folder, tmp_path):
    paths, roots = write(folder, range(6)), [str(tmp_path / "second"), str(tmp_path / "third")]
    for _ in range(2):
        scratch.spread(paths, 0, roots)
        drives = [os.path.realpath(path) for path in paths]
        assert [drive.startswith(str(folder)) for drive in drives] == [True, False, False] * 2
        assert [drive.startswith(roots[0]) for drive in drives] == [False, True, False] * 2
        for number, path in enumerate(paths):
            assert Path(path).read_bytes() == bytes([number]) * 1000
    assert sorted(each.name for each in folder.iterdir()) == [f"{number}.tensor.swp" for number in range(6)]


def test_links_survive_a_checkpoint(folder, tmp_path):
    """DeepSpeed copies the folder when it saves, and over it when it loads."""
    paths, root = write(folder, range(4)), str(tmp_path / "second")
    scratch.spread(paths, 0, [root])
    shutil.copytree(folder, tmp_path / "checkpoint")
    assert not any(each.is_symlink() for each in (tmp_path / "checkpoint").iterdir())
    write(folder, range(4))  # through the links
    for path in paths:
        Path(path).write_bytes(b"other")
    shutil.copytree(tmp_path / "checkpoint", folder, dirs_exist_ok=True)
    assert [first(path) for path in paths] == [0, 1, 2, 3]
    assert os.path.realpath(paths[1]).startswith(root)


def test_a_drive_that_is_not_used_any_more_has_nothing_left(folder, tmp_path):
    paths, root = write(folder, range(4)), tmp_path / "second"
    scratch.spread(paths, 0, [str(root)])
    scratch.spread(paths, 0, [])
    assert not any(Path(path).is_symlink() for path in paths)
    assert [first(path) for path in paths] == [0, 1, 2, 3]
    assert not any(each.is_file() for each in root.rglob("*"))


def test_a_drive_without_room_leaves_the_file_where_it_was(folder, tmp_path, monkeypatch):
    paths = write(folder, range(2))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(SwapError, match="another drive"):
        scratch.spread(paths, 0, [str(tmp_path / "second")])
    assert [first(path) for path in paths] == [0, 1]
    assert len(list(folder.iterdir())) == 2
