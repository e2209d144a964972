"""How fast a node moves bytes: what the user says, what `h2d tune` has measured, or typical values.

Each constant is from measurements of single copies and single updates. Whole steps and iterations are kept aside: they
check the model (``checks``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Host memory that one thread of an optimizer reads and writes a second, as long as the node has it. One update of 2^28
#: elements by DeepSpeed's CPU Adam, 28 bytes each, with 12 threads took 72.7 ms (behind_cpu_adam_h200.csv).
BYTES_OF_A_THREAD = 28 * 2**28 / 0.0727 / 12
#: Host memory of a node for all its ranks. Two sockets with eight channels of DDR5-4800 have 614 GB/s; programs such as
#: STREAM see about three quarters of that.
BYTES_OF_A_NODE = 450e9
#: Elements that a thread casts and scales a second where they are in the caches: 2^28 in 21 to 23 ms with 12 threads
#: (tiles_h200.csv).
CACHED_ELEMENTS_OF_A_THREAD = 2**28 / 0.022 / 12
#: Elements of a blocking, casting `copy_` from pageable memory a second: 2^28 in 111, 118, 121, 145, 151 and 170 ms
#: with one rank (copy_h200_*.json, staging_h200_*.csv, against_first_version_h200.csv); the median. A thread of the
#: driver copies, so other threads do not make it faster.
PAGEABLE_ELEMENTS = 2**28 / 0.133
#: What an update takes longer while a device reads the host's memory: 76.0 for 72.7 ms (behind_cpu_adam_h200.csv).
SLOWED_BY_COPIES = 76.0 / 72.7
#: Seconds of Python in forward and backward for each layer, which a device that has little to do waits for:
#: 18 layers, 0.055 s forward and 0.115 backward, of which gradients take 0.039 (whole_iterations_h200.csv, round 1).
PYTHON_OF_A_LAYER = (0.055 + 0.115 - 0.039) / 18
#: Of a device's peak in dense bf16, what training reaches; PaLM's report has 46%, Megatron-LM's 40 to 50%.
SHARE_OF_PEAK = 0.4
#: GB/s of one device to all others, one way: NVLink 4 (450 of 900 both ways); between nodes, one port of 400 Gbit/s.
WITHIN_NODE, BETWEEN_NODES = 450.0, 50.0


@dataclass(frozen=True)
class Device:
    """A device model: GB/s of its link to the host, one way, and TFLOP/s in dense bf16.

    The rates of PCIe are what copies reach: 512 MiB in 10.2 ms over PCIe 5 x16 (copy_h200_12_threads.json), half of
    that over PCIe 4. The TFLOP/s are those of the vendors' data sheets.
    """

    link: float
    tflops: float


PCIE_5, PCIE_4 = 2**29 / 0.01018 / 1e9, 2**29 / 0.01018 / 2e9
DEVICES = {
    "a100": Device(PCIE_4, 312),
    "h100": Device(PCIE_5, 989),
    "h200": Device(PCIE_5, 989),
    "b200": Device(PCIE_5, 2250),
    "mi300x": Device(PCIE_5, 1307),
    "l40s": Device(PCIE_4, 362),
    "rtx4090": Device(PCIE_4, 165),
}


@dataclass(frozen=True)
class Rates:
    """What one rank has while all others of its node work too; bytes, elements and operations a second.

    Attributes:
        memory: Host memory.
        cached: Elements that are cast and scaled in the caches.
        link: Host to device, and as fast the other way.
        pageable: Elements of a blocking, casting copy from pageable memory.
        staged: Elements of `pinned_staged`.
        operations: Of the device, in forward and backward.
        between: From one device to the others.
        drive: Files, reads and writes together; None where no state is in files.
    """

    memory: float
    cached: float
    link: float
    pageable: float
    staged: float
    operations: float
    between: float
    drive: float | None = None


@dataclass(frozen=True)
class Machine:
    """Rates, and a sentence on where each comes from."""

    rates: Rates
    sources: Mapping[str, str]


def machine(options: Mapping[str, Any], nodes: int, profile: Mapping[str, Any] | None = None) -> Machine:
    """The rates for a job: an option wins over the profile, the profile over a typical value.

    Args:
        options: ``ranks`` of a node and ``threads`` of each; GB/s: ``link``, ``memory_bandwidth`` of the node,
            ``network``, ``drive`` of the node, each or None; ``device``, a key of ``DEVICES``; ``tflops`` or None.
        nodes: Of the job.
        profile: What ``of_profile`` has made of a machine's profile.
    """
    ranks, threads, device = options["ranks"], options["threads"], DEVICES[options["device"]]
    measured, sources = profile or {}, {}

    def take(name: str, option: float | None, key: str, typical: float, why: str) -> float:
        if option is not None:
            sources[name] = "as given"
            return option
        if key in measured:
            sources[name] = f"measured by `h2d tune` with {measured['circumstances']}"
            return float(measured[key])
        sources[name] = f"typical: {why}"
        return typical

    share = options["memory_bandwidth"] and options["memory_bandwidth"] * 1e9 / ranks
    memory = take(
        "host memory",
        share and min(share, threads * BYTES_OF_A_THREAD),
        "memory",
        min(threads * BYTES_OF_A_THREAD, BYTES_OF_A_NODE / ranks),
        f"{BYTES_OF_A_THREAD / 1e9:.1f} GB/s a thread, {BYTES_OF_A_NODE / 1e9:.0f} a node",
    )
    link = take("link", options["link"] and options["link"] * 1e9, "link", device.link * 1e9, f"{options['device']}'s")
    pageable = take("pageable copies", None, "pageable", PAGEABLE_ELEMENTS, "2^28 elements in 0.133 s")
    staged = min(link / 2, memory / 8)  # the cast reads 4 bytes and writes 2, which the device reads
    staged = take("staged copies", None, "staged", staged, "bounded by host memory, 8 bytes an element, and the link")
    drive = options["drive"] and options["drive"] * 1e9 / ranks
    if drive is None and options["nvme"]:
        drive = take("drive", None, "drive", 3e9 / ranks, "3 GB/s a node, which one drive of PCIe 3 reaches")
    elif drive is not None:
        sources["drive"] = "as given"
    tflops = options["tflops"] or device.tflops * SHARE_OF_PEAK
    sources["device"] = "as given" if options["tflops"] else f"typical: {SHARE_OF_PEAK:.0%} of {device.tflops} TFLOP/s"
    between = WITHIN_NODE if nodes == 1 else BETWEEN_NODES
    network = take("network", options["network"], "", between, "NVLink 4" if nodes == 1 else "400 Gbit/s a device")
    return Machine(
        Rates(
            memory=memory,
            cached=threads * CACHED_ELEMENTS_OF_A_THREAD,
            link=link,
            pageable=pageable,
            staged=staged,
            operations=tflops * 1e12,
            between=network * 1e9,
            drive=drive,
        ),
        sources,
    )


def of_profile(profile: Any) -> dict[str, Any]:
    """The rates that a ``MachineProfile`` has, of one rank: ``memory``, ``link``, ``pageable``, ``staged``, ``drive``.

    ``circumstances`` are words on how it was measured.
    """
    found: dict[str, Any] = {
        "circumstances": f"{profile.measured.ranks} ranks and {profile.measured.threads_per_rank} threads",
        "ranks": profile.measured.ranks,
        "threads": profile.measured.threads_per_rank,
        "device": profile.machine.device,
    }
    if profile.measured.ranks == 1:
        found["circumstances"] = found["circumstances"].replace("ranks", "rank")
    if profile.optimizer is not None:
        last = profile.optimizer.updates[-1]
        found["memory"] = 28 * last.elements / last.seconds
    width = profile.measured.source_dtype.itemsize
    for key, strategy in (("pageable", "pageable"), ("staged", "pinned_staged"), ("link", "pinned_direct")):
        largest = [each.times[-1] for each in profile.copies if each.strategy == strategy]
        if largest:
            rate = max(one.elements / one.copy_seconds for one in largest)
            found[key] = rate * width if key == "link" else rate  # pinned_direct sends the source as it is
    if profile.drive is not None:
        read, written = profile.drive.best_read, profile.drive.best_write
        # As many bytes are written as are read, one after the other where they share the drive.
        found["drive"] = 2 / (1 / read.read_bytes_per_second + 1 / written.written_bytes_per_second)
    return found
