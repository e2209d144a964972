"""How much may be page-locked, on trees of files as systems have them, and for each launcher's variables."""

import pytest

from transfer import PinnedDirectConfig
from transfer.memory.host_budget import local_ranks, page_lock_budget_bytes

LAUNCHERS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "WORLD_SIZE",
)
#: In all 2000 kB, of which 10 are free: what is in use can be locked.
MEMINFO = "MemTotal:        2000 kB\nMemFree:           10 kB\nMemAvailable:    10 kB\nBuffers:   1 kB\n"
HOST = 1_024_000  # half of 2000 kB


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def group(path, limit, version=2):
    """The limit of one control group."""
    top = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    return {f"{top}{path}/memory.{'max' if version == 2 else 'limit_in_bytes'}": f"{limit}\n"}


IN = "proc/self/cgroup"
BASE = {"proc/meminfo": MEMINFO}
CASES = {
    "a host without control groups": (BASE, HOST),
    "no limit": ({**BASE, IN: "0::/a\n", **group("/a", "max")}, HOST),
    "a smaller limit": ({**BASE, IN: "0::/a\n", **group("/a", 500_001)}, 250_000),
    "a larger limit": ({**BASE, IN: "0::/a\n", **group("/a", 9_000_000)}, HOST),
    "a limit in the parent": (
        {**BASE, IN: "0::/a/b/c\n", **group("/a", 500_000), **group("/a/b", "max"), **group("/a/b/c", "max")},
        250_000,
    ),
    "the tightest of several": ({**BASE, IN: "0::/a/b\n", **group("/a", 500_000), **group("/a/b", 400_000)}, 200_000),
    "a container that sees the path of the host": (
        {**BASE, IN: "0::/docker/0123abcd\n", **group("", 600_000)},
        300_000,
    ),
    "a group beside ours does not count": ({**BASE, IN: "0::/a\n", **group("/a", "max"), **group("/b", 10)}, HOST),
    "the limit alone": ({IN: "0::/a\n", **group("/a", 70_000)}, 35_000),
    "version 1": (
        {
            **BASE,
            IN: "12:cpu,cpuacct:/x\n5:memory:/docker/a\n1:name=systemd:/x\n0::/x\n",
            **group("/docker/a", 800_000, version=1),
            **group("/x", 10, version=1),  # of another controller
        },
        400_000,
    ),
    "version 1 without a limit": (
        {**BASE, IN: "5:memory:/a\n", **group("/a", 9_223_372_036_854_771_712, version=1)},
        HOST,
    ),
    "version 1 in a container": ({**BASE, IN: "5:memory:/docker/a\n", **group("", 300_000, version=1)}, 150_000),
    "huge pages are set apart": ({"proc/meminfo": MEMINFO + "Hugetlb:    1000 kB\n"}, HOST // 2),
    "others have locked much": ({"proc/meminfo": MEMINFO + "Mlocked:    600 kB\n"}, HOST - 600 * 1024),
    "others have locked more than half": ({"proc/meminfo": MEMINFO + "Mlocked:    1600 kB\n"}, 0),
    "what this process has locked is not taken by others": (
        {"proc/meminfo": MEMINFO + "Mlocked:    600 kB\n", "proc/self/status": "Name:\tpython\nVmLck:\t 600 kB\n"},
        HOST,
    ),
    "nothing there": ({}, None),
    "nothing that helps": ({"proc/meminfo": "MemFree: 5 kB\n", IN: "0::/a\n"}, None),
}


@pytest.fixture
def no_launcher(monkeypatch):
    for name in (*LAUNCHERS, "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("case", CASES)
def test_the_budget_of_one_rank(tmp_path, case, no_launcher):
    files, expected = CASES[case]
    assert page_lock_budget_bytes(tree(tmp_path, files)) == expected


def test_ranks_share_the_budget(tmp_path, no_launcher):
    """The masters of 55 billion parameters on a host of 1 TiB with eight ranks fit, though most memory is in use."""
    no_launcher.setenv("LOCAL_WORLD_SIZE", "8")
    kilobytes = 2**30
    files = {"proc/meminfo": f"MemTotal: {kilobytes} kB\nMemFree: 200 kB\nMemAvailable: 100 kB\n"}
    budget = page_lock_budget_bytes(tree(tmp_path, files))
    assert budget == 2**40 // 2 // 8
    assert budget > 4 * 55 * 10**9 // 8


def test_what_others_locked_is_not_shared_once_more(tmp_path, no_launcher):
    """Seven ranks of eight have locked their share: the eighth has its own still."""
    no_launcher.setenv("LOCAL_WORLD_SIZE", "8")
    files = {"proc/meminfo": f"{MEMINFO}Mlocked: {1000 * 7 // 8} kB\n"}
    assert page_lock_budget_bytes(tree(tmp_path, files)) == HOST // 8


def test_this_machine_answers(no_launcher):
    assert PinnedDirectConfig().page_lock_budget_bytes() > 0
    assert PinnedDirectConfig(max_page_locked="1KiB").page_lock_budget_bytes() == 1024


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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_NTASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun inside a task
        ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 3),
        ({"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),8"}, 8),  # the node is not known
        ({"SLURM_NODEID": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2),8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2"}, 1),
        # One task of a step, in a job that was given eight for each node.
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"}, 1),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"WORLD_SIZE": "16", "RANK": "3"}, 16),  # started by hand: all of them may be here
    ],
)
def test_the_ranks_of_this_step_on_this_host(no_launcher, variables, expected):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    assert local_ranks() == expected


def test_without_variables_torch_knows(no_launcher):
    import torch.distributed

    no_launcher.setattr(torch.distributed, "is_initialized", lambda: True)
    no_launcher.setattr(torch.distributed, "get_world_size", lambda: 6)
    assert local_ranks() == 6


def test_the_limit_is_the_default(no_launcher):
    no_launcher.setattr("transfer.memory.host_budget.page_lock_budget_bytes", lambda: 123)
    assert PinnedDirectConfig().page_lock_budget_bytes() == 123
