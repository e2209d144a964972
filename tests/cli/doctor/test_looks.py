"""What `h2d doctor` reads from the system: links, nodes, limits, drives, profiles."""

import datetime as dt
import errno
import os
import resource
import shutil

import pytest

from accelerators.simulated import SimulatedAccelerator
from transfer.cli.doctor import device, drive, link, memory
from transfer.cli.doctor.finding import ok
from transfer.errors import ConfigError
from transfer.measured.profile import MachineProfile


@pytest.fixture
def machine(tmp_path):
    """Makes devices and NUMA nodes as Linux shows them."""

    def add(address, driver="nvidia", kind="0x030200", **values):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (tmp_path / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers" / driver)
        for name, value in {"class": kind, **values}.items():
            (folder / name).write_text(f"{value}\n")

    def nodes(*cores):
        for number, each in enumerate(cores):
            folder = tmp_path / f"sys/devices/system/node/node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{each}\n")

    return tmp_path, add, nodes


def speeds(now="32.0 GT/s PCIe", most="32.0 GT/s PCIe", width=16, most_width=16, node=0):
    return {
        "current_link_speed": now,
        "max_link_speed": most,
        "current_link_width": width,
        "max_link_width": most_width,
        "numa_node": node,
    }


def looked(root):
    return {finding.name: finding for finding in link.look(root)}


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    monkeypatch.setattr(link, "_nvidia_driver", lambda: ok("driver", "NVIDIA 580.1"))


def test_equal_links_are_told_once(machine):
    root, add, nodes = machine
    add("0000:18:00.0", **speeds())
    add("0000:2a:00.0", **speeds())
    add("0000:00:02.0", driver="bochs-drm", kind="0x030000")
    add("0000:01:00.0", driver="nvme", kind="0x010802")
    nodes("0-7")
    found = list(link.look(root))
    assert [(one.name, one.status) for one in found] == [("link", "ok"), ("NUMA", "ok"), ("driver", "ok")]
    assert found[0].found == "2 devices of driver nvidia: PCIe generation 5 x16 of generation 5 x16"


@pytest.mark.parametrize(
    ("changed", "found", "remedy"),
    [
        ({"width": 8}, "generation 5 x8 of generation 5 x16", "fewer lanes"),
        ({"now": "2.5 GT/s PCIe"}, "generation 1 x16 of generation 5 x16", "look again under load"),
        ({"now": "8 GT/s", "most": "16.0 GT/s"}, "generation 3 x16 of generation 4 x16", "look again under load"),
    ],
)
def test_a_link_below_what_is_possible(machine, changed, found, remedy):
    root, add, nodes = machine
    add("0000:18:00.0", **speeds(**changed))
    nodes("0-7")
    one = looked(root)["link"]
    assert one.status == "note"
    assert one.found.endswith(found)
    assert remedy in one.remedy


@pytest.mark.parametrize("values", [{}, speeds(now="Unknown", width=255), speeds(width=0)])
def test_a_link_that_the_system_does_not_tell(machine, values):
    root, add, _ = machine
    add("0000:18:00.0", driver="amdgpu", kind="0x120000", **values)
    found = looked(root)
    assert found["link"].status == "unknown"
    assert "driver" not in found
    assert found["NUMA"].status == "unknown"


@pytest.mark.parametrize(
    ("mine", "status", "text"),
    [
        ({0, 1}, "ok", "may run on [0]"),
        ({8}, "note", "may run on [1]"),
        ({0, 9}, "note", "may run on [0, 1]"),
    ],
)
def test_where_the_process_may_run(machine, monkeypatch, mine, status, text):
    root, add, nodes = machine
    add("0000:18:00.0", **speeds(node=0))
    nodes("0-7,16-23", "8-15")
    monkeypatch.setattr(link, "_own_cores", lambda: mine)
    found = looked(root)["NUMA"]
    assert found.status == status
    assert found.found.endswith(text)
    assert "devices at [0]" in found.found


def test_no_devices_at_all(tmp_path):
    assert {one.name: one.status for one in link.look(tmp_path)} == {"link": "unknown", "NUMA": "unknown"}


@pytest.mark.parametrize(
    ("soft", "hard", "status", "text"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", "unlimited"),
        (2**31, 2**31, "ok", "2 GiB"),
        (2**16, 2**16, "note", "which the administrator sets"),
        (2**16, resource.RLIM_INFINITY, "note", "`ulimit -l unlimited` (in"),
    ],
)
def test_the_limit_of_locked_memory(monkeypatch, soft, hard, status, text):
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, hard))
    found = memory._limit()
    assert found.status == status
    assert text in f"{found.found} {found.remedy}"


def test_host_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       67108864 kB\n")
    found = {one.name: one.found for one in memory.look(tmp_path)}
    assert found["host memory"] == "64 GiB, of the host or its control group"
    assert found["page-locked"] == "at most 8 GiB for each of 4 ranks"
    assert next(iter(memory.look(tmp_path / "nowhere"))).status == "unknown"


@pytest.mark.parametrize(
    ("sizes", "short"),
    [
        ([], 0),
        ([4096] * 3, 0),
        ([4096] * 6 + [1024] * 3, 0),
        ([4096] * 5, 0),  # masters alone: the first step was not over
        ([4096, 4096, 0], 1),
        ([4096, 4096, 100], 1),
        ([8192] * 5 + [4096], 1),
        ([8192] * 5 + [4096] * 3 + [1024], 1),
        ([8192] * 4 + [4096] * 2, 2),
    ],
)
def test_swap_files_that_were_cut_short(sizes, short):
    assert drive.short_files(sizes) == short


def test_a_drive(tmp_path, monkeypatch):
    folder = tmp_path / "zero_stage_3" / "optimizer" / "rank0"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.tensor.swp").write_bytes(os.urandom(4096))
    (folder / "0_gradient_0_8.tensor.swp").write_bytes(b"12345")
    found = {one.name: one for one in drive.look(str(tmp_path))}
    assert found["swap files"].found == "3 of DeepSpeed's (*.swp), none of them seems short"
    (folder / "2.tensor.swp").write_bytes(b"")
    found = {one.name: one for one in drive.look(str(tmp_path))}
    assert found["swap files"].status == "no"
    assert found["swap files"].found == "3 of DeepSpeed's (*.swp), 1 of them short"
    assert "free of" in found["space"].found
    usage = type("Usage", (), {"free": 2**30, "total": 2**40})
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert {one.name: one.status for one in drive.look(str(tmp_path))}["space"] == "note"
    assert [one.status for one in drive.look(str(tmp_path / "nowhere"))] == ["no"]


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [(errno.EINVAL, "note", "refused by this file system"), (errno.ENOSPC, "no", "a block cannot be written")],
)
def test_a_drive_that_refuses(tmp_path, monkeypatch, number, status, text):
    def refused(*_arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refused)
    found = drive._direct(tmp_path)
    assert found.status == status
    assert text in found.found
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_in_memory_is_no_drive(tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "file_system", lambda _path: "tmpfs")
    assert next(iter(drive.look(str(tmp_path)))).status == "note"


@pytest.mark.parametrize(
    ("days", "mismatch", "status"), [(3, None, "ok"), (400, None, "note"), (3, "It has other cores.", "note")]
)
def test_the_profile_and_its_age(monkeypatch, days, mismatch, status):
    date = (dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=days)).isoformat(timespec="seconds")

    class Profile:
        measured = type("Measured", (), {"date": date})

        def mismatch(self, _accelerator):
            return mismatch

    monkeypatch.setattr(MachineProfile, "load", lambda: Profile())
    found = device.look_at_profile(SimulatedAccelerator())
    assert found.status == status
    assert f"{days} days old" in found.found


def test_a_profile_that_cannot_be_read(monkeypatch):
    def broken():
        raise ConfigError("this is no machine profile")

    monkeypatch.setattr(MachineProfile, "load", broken)
    assert device.look_at_profile(None).found == "this is no machine profile"


def test_an_accelerator_that_is_not_available(monkeypatch):
    weak = SimulatedAccelerator()
    monkeypatch.setattr(device, "get_accelerator", lambda _name: weak)
    monkeypatch.setattr(weak, "unavailable_reason", lambda: "It is at the repair shop.")
    chosen, found = device.look(None)
    assert chosen is None
    assert (found[0].status, found[0].found) == ("no", "simulated: It is at the repair shop.")
