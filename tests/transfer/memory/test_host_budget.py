"""What is left of the host's memory, on trees of files as systems have them."""

import pytest

from transfer import PinnedDirectConfig
from transfer.memory.host_budget import available_bytes, local_ranks
from transfer.strategies import pinned_direct

LAUNCHERS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
MEMINFO = "MemTotal:        2000 kB\nMemFree:           10 kB\nMemAvailable:    1000 kB\nBuffers:   1 kB\n"
HOST = 1_024_000  # 1000 kB


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def group(path, limit, usage, stat=None, version=2):
    """The files of one control group."""
    top = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    files = dict(zip((f"{top}{path}/memory.{name}" for name in names), (f"{limit}\n", f"{usage}\n"), strict=True))
    if stat is not None:
        files[f"{top}{path}/memory.stat"] = stat
    return files


IN = "proc/self/cgroup"
BASE = {"proc/meminfo": MEMINFO}
CASES = {
    "a host without control groups": (BASE, HOST),
    "no limit": ({**BASE, IN: "0::/a\n", **group("/a", "max", 5000)}, HOST),
    "a smaller limit": ({**BASE, IN: "0::/a\n", **group("/a", 500_000, 100_000)}, 400_000),
    "a larger limit": ({**BASE, IN: "0::/a\n", **group("/a", 9_000_000, 100_000)}, HOST),
    "a limit in the parent": (
        {
            **BASE,
            IN: "0::/a/b/c\n",
            **group("/a", 500_000, 200_000),
            **group("/a/b", "max", 1),
            **group("/a/b/c", "max", 1),
        },
        300_000,
    ),
    "the tightest of several": (
        {**BASE, IN: "0::/a/b\n", **group("/a", 500_000, 100_000), **group("/a/b", 400_000, 390_000)},
        10_000,
    ),
    "a container that sees the path of the host": (
        {**BASE, IN: "0::/docker/0123abcd\n", **group("", 600_000, 100_000)},
        500_000,
    ),
    "a group beside ours does not count": (
        {**BASE, IN: "0::/a\n", **group("/a", "max", 1), **group("/b", 10, 0)},
        HOST,
    ),
    "page cache is available": (
        {
            **BASE,
            IN: "0::/a\n",
            **group("/a", 500_000, 450_000, "anon 1\ninactive_anon 77\nactive_file 88\ninactive_file 300000\n"),
        },
        350_000,
    ),
    "more used than allowed": ({**BASE, IN: "0::/a\n", **group("/a", 1000, 5000)}, 0),
    "the limit alone, without MemAvailable": (
        {"proc/meminfo": "MemTotal: 5 kB\n", IN: "0::/a\n", **group("/a", 70_000, 20_000)},
        50_000,
    ),
    "version 1": (
        {
            **BASE,
            IN: "12:cpu,cpuacct:/x\n5:memory:/docker/a\n1:name=systemd:/x\n0::/x\n",
            **group("/docker/a", 800_000, 300_000, version=1),
            **group("/x", 10, 0, version=1),  # of another controller
        },
        500_000,
    ),
    "version 1 with page cache, the group's and its children's": (
        {
            **BASE,
            IN: "5:memory:/a\n",
            **group("/a", 800_000, 700_000, "inactive_file 10\ntotal_inactive_file 400000\n", version=1),
        },
        500_000,
    ),
    "version 1 without a limit": (
        {**BASE, IN: "5:memory:/a\n", **group("/a", 9_223_372_036_854_771_712, 1000, version=1)},
        HOST,
    ),
    "version 1 in a container": (
        {**BASE, IN: "5:memory:/docker/a\n", **group("", 300_000, 100_000, version=1)},
        200_000,
    ),
    "nothing there": ({}, None),
    "nothing that helps": ({"proc/meminfo": "MemTotal: 5 kB\n", IN: "0::/a\n"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_available_bytes(tmp_path, case):
    files, expected = CASES[case]
    assert available_bytes(tree(tmp_path, files)) == expected


def test_this_machine_answers():
    left = available_bytes()
    assert left is None or left >= 0


@pytest.fixture
def no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_launchers_variable_counts(no_launcher, name):
    no_launcher.setenv(name, "8")
    assert local_ranks() == 8


@pytest.mark.parametrize("nonsense", ["", "0", "-4", "four", "4(x2)", "1.5", " "])
def test_nonsense_is_passed_over(no_launcher, nonsense):
    no_launcher.setenv("LOCAL_WORLD_SIZE", nonsense)
    assert local_ranks() == 1
    no_launcher.setenv("SLURM_NTASKS_PER_NODE", "3")
    assert local_ranks() == 3


def test_torchruns_variable_comes_first(no_launcher):
    no_launcher.setenv("SLURM_NTASKS_PER_NODE", "1")
    no_launcher.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_ranks() == 4


def test_the_budget_is_half_of_what_is_left_shared_among_the_ranks(no_launcher):
    no_launcher.setattr(pinned_direct, "available_bytes", lambda: 1_000_001)
    assert PinnedDirectConfig().page_lock_budget_bytes() == 500_000
    no_launcher.setenv("LOCAL_WORLD_SIZE", "4")
    assert PinnedDirectConfig().page_lock_budget_bytes() == 125_000
    assert PinnedDirectConfig(max_page_locked="1KiB").page_lock_budget_bytes() == 1024
    no_launcher.setattr(pinned_direct, "available_bytes", lambda: None)
    assert PinnedDirectConfig().page_lock_budget_bytes() is None
