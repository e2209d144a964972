"""Where swap files go, what they are called, and whose they are."""

import errno
import os
import shutil
import stat
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from tests.nvme.tools import PREAMBLE, files_below, swap_out
from tests.running import run_program, succeeds
from transfer import (
    ConfigError,
    NvmeSwappedTransfer,
    SwapError,
    SwapNotADirectoryError,
    SwapPermissionError,
    TransferError,
    nvme,
)
from transfer.nvme.leftovers import remove_leftovers

NAMES = {
    "none": None,
    "empty": "",
    "slash": "a/b",
    "absolute": "/etc/passwd",
    "up": "../../x",
    "dots": "..",
    "dot": ".",
    "newline": "a\nb",
    "NUL": "a\0b",
    "300 characters": "_".join(map(str, range(100)))[:300],
    "1000 letters of four bytes": "\U0001f600" * 1000,
    "unicode": "größe-重み",
    "surrogate": "a\udc80b",
    "a suffix": "model.layers.0.weight",
    "our own": "h2d-swap-rank0",
    "part": "x.part",
}


@pytest.mark.parametrize("kind", NAMES)
def test_any_name(root, kind):
    first = swap_out(torch.ones(3), root, NAMES[kind])
    second = swap_out(torch.zeros(3), root, NAMES[kind])
    assert first.path != second.path
    assert sorted(path.name for path in root.parent.iterdir()) == ["root"]
    for swapped in (first, second):
        assert swapped.path.resolve().parent.parent == root.resolve()
        assert len(os.fsencode(swapped.path.name)) <= 255
        assert swapped.path.name.isprintable()
    assert (nvme.swap_in(first).tolist(), nvme.swap_in(second).tolist()) == ([1, 1, 1], [0, 0, 0])


def test_names_that_are_written_alike_stay_apart(root):
    swapped = {name: swap_out(torch.tensor([float(i)]), root, name) for i, name in enumerate(["a/b", "a_b", "a b"])}
    assert [nvme.swap_in(each).item() for each in swapped.values()] == [0, 1, 2]


def test_the_root_is_made_with_its_parents_and_is_ours_alone(tmp_path):
    swapped = swap_out(torch.ones(3), tmp_path / "a" / "b c" / "d")
    assert swapped.path.parents[1] == tmp_path / "a" / "b c" / "d"
    assert stat.S_IMODE(swapped.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(swapped.path.stat().st_mode) == 0o600


def test_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    swapped = swap_out(torch.ones(3), "~/swap")
    assert swapped.path.parents[1] == tmp_path / "swap"
    with NvmeSwappedTransfer(path="~/other") as transfer:
        assert transfer.swap_out(torch.ones(3)).path.parents[1] == tmp_path / "other"
    assert not (tmp_path / "~").exists()


def test_a_relative_root_means_the_same_after_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swapped = swap_out(torch.ones(3), "here")
    monkeypatch.chdir("/")
    assert nvme.swap_in(swapped).tolist() == [1, 1, 1]
    assert swapped.path.parents[1] == tmp_path / "here"


def test_a_link_to_a_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    swapped = swap_out(torch.ones(3), tmp_path / "link")
    assert swapped.path.parents[1] == tmp_path / "link"
    assert nvme.swap_in(swapped).tolist() == [1, 1, 1]


@pytest.mark.parametrize("path", ["file", "file/below", "dangling", "loop", "a\0b", "x" * 300, "~nosuchuser/x"])
def test_what_is_no_directory(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SwapError) as caught:
        swap_out(torch.ones(3), path)
    assert path in caught.value.filename
    assert isinstance(caught.value, TransferError)
    assert "/" in path or path in ("a\0b", "x" * 300) or isinstance(caught.value, NotADirectoryError)
    assert sorted(tmp_path.iterdir()) == before
    assert Path("file").read_text() == "mine"
    assert nvme.swap_in(swap_out(torch.ones(3), "good")).tolist() == [1, 1, 1]


def test_a_file_below_the_root_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SwapNotADirectoryError):
        swap_out(torch.ones(3), tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere.")
def test_a_directory_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SwapPermissionError):
        swap_out(torch.ones(3), tmp_path)


def test_no_path_is_configured(simulated):
    with (
        NvmeSwappedTransfer(accelerator=simulated) as transfer,
        pytest.raises(ConfigError, match=r"nvme_swapped\.path"),
    ):
        transfer.swap_out(torch.ones(3))


@pytest.mark.parametrize("path", ["", " ", "a\0b", 5, True, ["/tmp"]])
def test_paths_that_mean_nothing_are_refused_when_they_are_configured(path):
    with pytest.raises(ConfigError, match="path"):
        NvmeSwappedTransfer(path=path)


def test_a_root_that_went_away_is_made_again(root):
    import shutil

    swap_out(torch.ones(3), root)
    shutil.rmtree(root)
    assert nvme.swap_in(swap_out(torch.ones(3), root)).tolist() == [1, 1, 1]


def test_threads_that_make_a_root_at_the_same_moment(root):
    barrier, made = threading.Barrier(8), []

    def work(value):
        barrier.wait(30)
        made.append((value, swap_out(torch.full((3,), value), root, "same")))

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({swapped.path.parent for _, swapped in made}) == 1
    assert len(made) == 8
    assert all(nvme.swap_in(swapped).tolist() == [value] * 3 for value, swapped in made)


def run(program, *arguments, **how):
    """Runs a program whose ``child`` starts a process that ends as a program does."""
    return run_program(PREAMBLE + textwrap.dedent(program), *arguments, **how)


@pytest.mark.slow
def test_processes_that_make_the_root_at_the_same_moment(root):
    done = run(
        """
        start, check = Gate(), Gate()
        def work(value):
            start.wait()
            swapped = swap_out(torch.full((1000,), value), root / "deep" / "er", "same")
            check.wait()
            assert nvme.swap_in(swapped).tolist() == [value] * 1000
        children = [child(work, float(value)) for value in range(3)]
        start.open(3)
        time.sleep(0.3)
        check.open(3)
        assert [ended(each) for each in children] == [0] * 3
        """,
        root,
    )
    succeeds(done)
    assert not files_below(root)
    assert not [path for path in (root / "deep" / "er").iterdir() if path.is_dir()]


@pytest.mark.slow
def test_a_live_run_is_left_alone_and_a_dead_one_is_removed(root):
    done = run(
        """
        there, kill = Gate(), Gate()
        def killed():
            swapped = swap_out(torch.ones(1000), root)
            (root / "path").write_text(str(swapped.path))
            there.open()
            kill.wait()
            os.kill(os.getpid(), 9)
        first = child(killed)
        there.wait()
        path = Path((root / "path").read_text())
        assert ended(child(swap_out, torch.ones(3), root)) == 0
        assert path.stat().st_size == 8192
        kill.open()
        assert ended(first) == -9
        assert path.exists()
        logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
        swapped = swap_out(torch.ones(3), root)
        assert not path.parent.exists()
        assert ended(child(swap_out, torch.ones(3), root)) == 0
        assert nvme.swap_in(swapped).tolist() == [1, 1, 1]
        print(path.parent)
        """,
        root,
    )
    removed, path = done.stdout.splitlines()
    # The file, the lock, which is empty, and the machine's name of 36 letters.
    assert removed == f"removed {path} with {8192 + 36} bytes of swap files of a run that has ended"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_killed_run_in_the_middle_of_a_write(root):
    done = run(
        """
        writing = Gate()
        def work():
            kept = swap_out(torch.ones(1000), root)
            pwrite, calls = os.pwrite, []
            def slow(*args):
                calls.append(1)
                if len(calls) == 3:
                    writing.open()
                    time.sleep(60)
                return pwrite(*args)
            os.pwrite = slow
            swap_out(torch.zeros(5_000_000), root, threads=1)
        killed = child(work)
        writing.wait()
        os.kill(killed, 9)
        assert ended(killed) == -9
        assert sorted(path.suffix for path in root.rglob("*-*.*")) == [".part", ".swap"]
        swapped = swap_out(torch.ones(3), root)
        assert [path for path in root.rglob("*-*.*")] == [swapped.path]
        assert nvme.swap_in(swapped).tolist() == [1, 1, 1]
        """,
        root,
    )
    succeeds(done)
    assert not files_below(root)


@pytest.mark.slow
def test_what_is_not_ours_is_never_removed(root):
    """Files and directories of others, whatever they are called, and what links lead to.

    Nor is a run of another machine on a shared file system: its lock is not seen here, so nothing tells that it is
    dead. On a file system of this machine alone, it was one before the last restart.
    """
    theirs, mine = root / "h2d-swap-rank0-pid1-x", root.parent / "mine"
    theirs.mkdir(parents=True)
    (theirs / "lock").touch()
    (theirs / "machine").write_text("another")
    (theirs / "tensor-0.swap").write_text("theirs")
    mine.mkdir()
    (mine / "data").write_text("mine")
    (root / "h2d-swap-rank0-link").symlink_to(mine)
    (root / "h2d-swap-rank0-file").write_text("mine")
    (root / "h2d-swap-rankings").mkdir()
    (root / "h2d-swap-rankings" / "data").write_text("mine")
    (root / "other").mkdir()
    (root / "data.swap").write_text("mine")
    done = run(
        """
        import transfer.nvme.leftovers as leftovers
        def left():
            assert ended(child(swap_out, torch.ones(3), root)) == 0
            print(*sorted(path.name for path in root.iterdir()))
        leftovers.is_local = lambda path: False
        left()
        leftovers.is_local = lambda path: True
        left()
        """,
        root,
    )
    others = "h2d-swap-rank0-file h2d-swap-rank0-link"
    alike = "h2d-swap-rankings other"
    succeeds(
        done,
        f"data.swap {others} h2d-swap-rank0-pid1-x {alike}\ndata.swap {others} {alike}\n",
    )
    assert (mine / "data").read_text() == (root / "h2d-swap-rankings" / "data").read_text() == "mine"


@pytest.mark.slow
def test_a_live_run_whose_lock_was_cleaned_away_keeps_its_values(root):
    """A cleaner of drives deletes files that were not touched for weeks."""
    swapped = swap_out(torch.ones(3), root)
    for name in ("lock", "machine"):
        (swapped.path.parent / name).unlink()
    unfinished = root / "h2d-swap-rank0-pid1-abc"
    unfinished.mkdir()
    done = run("assert ended(child(swap_out, torch.ones(3), root)) == 0", root)
    succeeds(done)
    assert nvme.swap_in(swapped).tolist() == [1, 1, 1]
    assert not unfinished.exists()


@pytest.mark.parametrize("garbage", [b"\xff" * 8, b"", None])
def test_a_leftover_that_cannot_be_read_stops_no_write(root, garbage):
    """What a crash may leave of the machine's name: other bytes, nothing, or a directory in its place."""
    dead = root / "h2d-swap-rank0-pid1-abc"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "tensor-0.swap").write_bytes(b"old")
    (dead / "machine").write_bytes(garbage) if garbage is not None else (dead / "machine").mkdir()
    assert nvme.swap_in(swap_out(torch.ones(3), root)).tolist() == [1, 1, 1]
    assert dead.exists() == (garbage is None)


@pytest.mark.parametrize(
    "odd", ["pipe", "endless", "dangling", "links", "lock is a pipe", "lock is a link", "no access"]
)
def test_odd_things_in_a_leftover_stop_no_write_and_reach_nothing_else(root, odd):
    """Instead of what a run has left there: in a program, as a pipe without another end would block for ever."""
    dead, mine = root / "h2d-swap-rank0-pid1-abc", root.parent / "mine"
    dead.mkdir(parents=True)
    mine.mkdir()
    (mine / "data").write_text("mine")
    (dead / "lock").touch()
    match odd:
        case "pipe":
            os.mkfifo(dead / "machine")
        case "endless":
            (dead / "machine").symlink_to("/dev/zero")
        case "dangling":
            (dead / "tensor-0.swap").symlink_to(dead / "nowhere")
        case "links":
            (dead / "tensor-0.swap").symlink_to(mine / "data")
            (dead / "more").symlink_to(mine)
        case "lock is a pipe":
            (dead / "lock").unlink()
            os.mkfifo(dead / "lock")
        case "lock is a link":
            (dead / "lock").unlink()
            (dead / "lock").symlink_to(mine / "data")
        case "no access":
            dead.chmod(0)
    done = run(
        """
        swapped = swap_out(torch.ones(3), root)
        assert nvme.swap_in(swapped).tolist() == [1, 1, 1]
        """,
        root,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    assert (mine / "data").read_text() == "mine"
    if dead.exists():
        dead.chmod(0o700)
    assert dead.exists() == (odd in ("endless", "lock is a link") or (odd == "no access" and os.geteuid() != 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", [".h2d-swap-lock", "h2d-swap-rank0-pid1-abc/lock", ".h2d-swap-rank0-pid1-abc/lock"])
def test_a_lock_that_another_process_holds_is_not_waited_for(root, name):
    lock = root / name
    lock.parent.mkdir(parents=True)
    done = run(
        """
        import fcntl
        descriptor = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert ended(child(swap_out, torch.ones(3), root)) == 0
        """,
        root,
        lock,
        timeout=20,
    )
    succeeds(done)
    assert lock.exists()


@pytest.mark.parametrize("content", [(), ("lock",), ("lock", "machine")])
def test_a_run_that_was_killed_while_it_made_its_directory(root, content):
    """It had locked it, or had not, and its name still began with a dot."""
    hidden = root / ".h2d-swap-rank0-pid1-abc"
    hidden.mkdir(parents=True)
    for name in content:
        (hidden / name).touch()
    swapped = swap_out(torch.ones(3), root)
    assert [*root.iterdir()] == [swapped.path.parent]


@pytest.mark.parametrize("when", ["mkdtemp", "open", "flock", "write_text", "rename"])
def test_another_process_tidies_up_while_a_directory_is_made(root, monkeypatch, when):
    """Before each step of making it: the run ends up with a directory of its own, which later ones leave alone."""
    import fcntl

    root.mkdir()
    owner, name = {"mkdtemp": (tempfile, when), "open": (os, when), "flock": (fcntl, when)}.get(when, (Path, when))
    original, tidied = getattr(owner, name), []

    def tidy(*args, **kwargs):
        if not tidied:
            tidied.append(True)
            remove_leftovers(root)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, tidy)
    swapped = swap_out(torch.ones(3), root)
    monkeypatch.undo()
    assert tidied
    remove_leftovers(root)
    assert [*root.iterdir()] == [swapped.path.parent]
    assert {"lock", "machine"} < {path.name for path in swapped.path.parent.iterdir()}
    assert nvme.swap_in(swapped).tolist() == [1, 1, 1]


def test_values_that_are_swapped_out_while_the_directory_is_made(root, monkeypatch):
    """By a finalizer or a signal handler of the same thread."""
    mkdtemp, inside = tempfile.mkdtemp, []

    def interrupted(*args, **kwargs):
        if not inside:
            inside.append(None)
            inside[0] = swap_out(torch.zeros(3), root)
        return mkdtemp(*args, **kwargs)

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    swapped = swap_out(torch.ones(3), root)
    assert [nvme.swap_in(each).tolist() for each in (swapped, *inside)] == [[1, 1, 1], [0, 0, 0]]


def test_a_removal_that_is_killed_is_finished_by_the_next(root, monkeypatch):
    dead = root / "h2d-swap-rank0-pid1-abc"
    dead.mkdir(parents=True)
    for name in ("lock", "machine", "tensor-0.swap", "tensor-1.part"):
        (dead / name).touch()
    removed, unlink = [], Path.unlink

    def killed(path, missing_ok=False):
        if dead in path.parents:
            removed.append(path.name)
            if len(removed) == 2:
                raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            swap_out(torch.ones(3), root)
    assert (dead / "lock").exists()
    swap_out(torch.ones(3), root)
    assert not dead.exists()


def test_a_run_that_ends_while_it_is_removed_is_no_reason_to_warn(root, monkeypatch, caplog):
    dead = root / "h2d-swap-rank0-pid1-abc"
    dead.mkdir(parents=True)
    (dead / "lock").touch()

    def gone(path):
        raise FileNotFoundError(errno.ENOENT, "gone", str(path))

    monkeypatch.setattr(shutil, "rmtree", gone)
    swap_out(torch.ones(3), root)
    assert not caplog.records


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "not yours"), ValueError("what is this?")])
def test_what_cannot_be_removed_is_logged_and_stops_no_write(root, monkeypatch, caplog, error):
    dead = root / "h2d-swap-rank0-pid1-abc"
    dead.mkdir(parents=True)
    (dead / "lock").touch()

    def refused(path):
        raise error

    monkeypatch.setattr(shutil, "rmtree", refused)
    assert nvme.swap_in(swap_out(torch.ones(3), root)).tolist() == [1, 1, 1]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(error) in record.getMessage()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="Only root can act as two users.")
def test_two_users_share_a_root(root):
    """As in /local_nvme, where every user may write, and none may remove another's files."""
    root.mkdir()
    root.chmod(0o1777)
    for parent in root.parents:
        if parent != Path("/tmp") and parent.owner() == "root" and "pytest" in str(parent):
            parent.chmod(0o755)
    done = run(
        """
        there, end = Gate(), Gate()
        def work(user, umask):
            os.umask(umask)
            os.setuid(user)
            swapped = swap_out(torch.ones(3), root)
            assert nvme.swap_in(swapped).tolist() == [1, 1, 1]
            there.open()
            end.wait()
        first = child(work, 12345, 0o077)
        there.wait()
        second = child(work, 12346, 0o022)
        there.wait()
        assert len(list(root.glob("h2d-swap-rank*"))) == 2
        end.open(2)
        assert (ended(first), ended(second)) == (0, 0)
        """,
        root,
    )
    succeeds(done)


@pytest.mark.slow
def test_a_fork_while_a_directory_is_made_holds_no_lock(root):
    """The child has a copy of the descriptor of the lock, which must be free again for both, and for others."""
    done = run(
        """
        import tempfile, threading
        inside, go_on = threading.Event(), threading.Event()
        mkdtemp = tempfile.mkdtemp
        def slow(*args, **kwargs):
            inside.set()
            go_on.wait(30)
            return mkdtemp(*args, **kwargs)
        tempfile.mkdtemp = slow
        thread = threading.Thread(target=nvme.swap_out, args=(torch.ones(3), root))
        thread.start()
        inside.wait(30)
        there, end = Gate(), Gate()
        def work():
            tempfile.mkdtemp = mkdtemp
            end.wait()
            assert nvme.swap_in(swap_out(torch.ones(3), root)).tolist() == [1, 1, 1]
        forked = child(work)
        go_on.set()
        thread.join(30)
        assert ended(child(swap_out, torch.ones(3), root)) == 0
        end.open()
        assert ended(forked) == 0
        """,
        root,
        timeout=30,
    )
    succeeds(done)
