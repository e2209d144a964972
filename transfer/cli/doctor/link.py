"""What connects the host with its devices, as Linux tells in ``/sys``: PCIe, and the NUMA node of each device."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .finding import Finding, note, ok, unknown

#: PCI classes: display controllers other than for text, and accelerators.
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
#: Drivers of devices that compute; others of these classes draw the console.
_DRIVERS = frozenset({"nvidia", "amdgpu", "xe", "i915", "habanalabs", "davinci_device", "devdrv"})
#: Gigatransfers a second of each PCIe generation.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_NVIDIA_SMI_SECONDS = 20.0


@dataclass(frozen=True)
class Link:
    """One device's link. None where the system does not tell."""

    driver: str
    generation: int | None
    most_generation: int | None
    width: int | None
    most_width: int | None
    node: int | None

    def __str__(self) -> str:
        return (
            f"PCIe generation {self.generation} x{self.width} of generation {self.most_generation} x{self.most_width}"
        )

    @property
    def is_known(self) -> bool:
        """Whether generation and width are known, as they are and as they may be."""
        return None not in (self.generation, self.most_generation, self.width, self.most_width)


def look(root: Path = Path("/")) -> Iterator[Finding]:
    """Each different link once; the placement on NUMA nodes; the driver.

    Args:
        root: Where ``sys`` is; for tests.
    """
    links = list(_links(root))
    if not links:
        yield unknown("link", "the system shows no device of a known driver on PCI")
    for link in dict.fromkeys(links):
        yield _link(link, links.count(link))
    yield from _placement(links, root)
    if any(link.driver == "nvidia" for link in links):
        yield _nvidia_driver()


def _links(root: Path) -> Iterator[Link]:
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = _line(device / "class") or ""
        driver = Path(os.path.realpath(device / "driver")).name
        if kind[:6] in _CLASSES and driver in _DRIVERS:
            node = _line(device / "numa_node")
            yield Link(
                driver,
                _generation(device / "current_link_speed"),
                _generation(device / "max_link_speed"),
                _number(_line(device / "current_link_width")),
                _number(_line(device / "max_link_width")),
                int(node) if node and int(node) >= 0 else None,
            )


def _link(link: Link, count: int) -> Finding:
    devices = f"{count} device{'s' * (count != 1)} of driver {link.driver}"
    if not link.is_known:
        return unknown("link", f"{devices}; the system does not tell its PCIe link")
    found = f"{devices}: {link}"
    wanted = f"generation {link.most_generation} x{link.most_width}"
    if (link.width or 0) < (link.most_width or 0):
        return note(
            "link", found, wanted, "The slot, a riser or a switch has fewer lanes than the device: look at the slots."
        )
    if (link.generation or 0) < (link.most_generation or 0):
        return note(
            "link", found, wanted, "Idle devices slow their link: look again under load. If it stays, look at the BIOS."
        )
    return ok("link", found)


def _placement(links: list[Link], root: Path) -> Iterator[Finding]:
    nodes = {path.name.removeprefix("node"): path for path in (root / "sys/devices/system/node").glob("node[0-9]*")}
    if len(nodes) < 2:
        yield ok("NUMA", "one node") if nodes else unknown("NUMA", "the system does not tell its nodes")
        return
    mine = _own_cores()
    allowed = sorted(int(name) for name, path in nodes.items() if mine & _cores(_line(path / "cpulist") or ""))
    of_devices = sorted({link.node for link in links if link.node is not None})
    found = f"{len(nodes)} nodes, devices at {of_devices or 'no known node'}, this process may run on {allowed}"
    if len(allowed) > 1:
        yield note(
            "NUMA",
            found,
            "each rank on the node of its device",
            "Start with `deepspeed --bind_cores_to_rank`, or `numactl --cpunodebind N --membind N` for each rank.",
        )
    elif of_devices and not set(allowed) & set(of_devices):
        yield note("NUMA", found, "this process on the node of a device", "Bind it there: `numactl --cpunodebind N`.")
    else:
        yield ok("NUMA", found)


def _nvidia_driver() -> Finding:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return unknown("driver", "nvidia-smi does not answer")
    versions = sorted(set(done.stdout.split()))
    return ok("driver", f"NVIDIA {', '.join(versions)}") if versions else unknown("driver", "nvidia-smi names none")


def _own_cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def _cores(text: str) -> set[int]:
    """``{0, 1, 2, 8}`` for ``0-2,8``."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _generation(path: Path) -> int | None:
    """Of a line such as ``32.0 GT/s PCIe``."""
    speed = re.match(r"[0-9.]+", _line(path) or "")
    return _GENERATIONS.get(float(speed[0])) if speed is not None else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and 0 < int(text) < 255 else None


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
