"""Small copies over and over: nothing that a process holds grows."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from tests.growth import check_growth, rounds
from transfer import build_transfer
from transfer.nvme import swap_out

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="What a process holds is read in /proc."),
]

ELEMENTS = 1000
CONFIGS = {
    "pageable": {"strategy": "pageable"},
    "pinned_staged": {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 300}},
    "pinned_direct, mapped": {"strategy": "pinned_direct"},
    "pinned_direct, chunks": {"strategy": "pinned_direct", "pinned_direct": {"mapped": False, "chunk_elements": 300}},
    "nvme_swapped": {"nvme_swapped": {"chunk_elements": 1024, "buffers": 2, "threads": 2}},
    "nvme_swapped, cast on the host": {"nvme_swapped": {"chunk_elements": 1024, "threads": 2, "cast": "host"}},
    "default": {},
    "default, verify: sample": {"verify": "sample"},
    "default, verify: full": {"verify": "full"},
}


@rounds(400, 100_000)
@pytest.mark.parametrize("name", CONFIGS)
def test_copies_of_a_thousand_elements(simulated, tmp_path, monkeypatch, name, number):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    transfer = build_transfer({"fallback": False, **CONFIGS[name]}, simulated)
    master = torch.arange(float(ELEMENTS))
    transfer.prepare(master)
    source = swap_out(master, tmp_path) if name.startswith("nvme") else master
    partitions = [simulated.device_empty(ELEMENTS, dtype=torch.bfloat16) for _ in range(4)]

    def work():
        """Three that are waited for together, and one at once."""
        copies = [transfer.submit(each, source) for each in partitions[1:]]
        transfer.copy(partitions[0], source)
        for copy in copies:
            copy.release_source()
            copy.wait()

    check_growth(work, number // 4, simulated)
    assert all(torch.equal(each, master.bfloat16()) for each in partitions)
    transfer.close()
    assert simulated.pinned_bytes == 0


@rounds(100, 20_000)
def test_sources_that_come_and_go(simulated, number):
    """Each is page-locked, copied from, and freed, or given back before."""
    transfer = build_transfer({"strategy": "pinned_direct", "fallback": False}, simulated)
    partition = simulated.device_empty(ELEMENTS, dtype=torch.bfloat16)
    turns = iter(range(10**9))

    def work():
        source = torch.full((ELEMENTS,), 3.0)
        transfer.prepare(source)
        transfer.copy(partition, source)
        if next(turns) % 2:
            transfer.unprepare(source)

    check_growth(work, number, simulated)
    transfer.close()
    assert simulated.pinned_bytes == 0


@rounds(100, 5_000)
def test_errors_and_closes(simulated, number):
    """A copy that is refused, one whose values are wrong, and a close, in each round."""
    transfer = build_transfer({"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 300}}, simulated)
    partition, source = simulated.device_empty(ELEMENTS, dtype=torch.bfloat16), torch.ones(ELEMENTS)
    enqueue = simulated.enqueue_copy

    def fails(*_tensors):
        raise OSError("injected")

    def work():
        with pytest.raises(ValueError, match="shapes differ"):
            transfer.copy(partition, source[1:])
        simulated.enqueue_copy = fails
        with pytest.raises(OSError, match="injected"):
            transfer.copy(partition, source)
        simulated.enqueue_copy = enqueue
        transfer.copy(partition, source)
        transfer.close()

    check_growth(work, number, simulated)


def touched(number_bytes):
    """Memory of its own that is resident: an allocator may hand out what another test has left."""
    memory = mmap.mmap(-1, number_bytes)
    memory.write(bytes(number_bytes))
    return memory


@pytest.mark.parametrize("leak", ["objects", "descriptors", "pinned memory", "resident memory"])
def test_what_grows_is_seen(simulated, leak):
    kept = []
    leaks = {
        "objects": lambda: kept.extend(object() for _ in range(8)),
        "descriptors": lambda: kept.append(os.open(os.devnull, os.O_RDONLY)),
        "pinned memory": lambda: kept.append(simulated.pin_empty(1, dtype=torch.uint8)),
        "resident memory": lambda: kept.append(touched(1_600_000)),
    }
    try:
        with pytest.raises(AssertionError, match="100 rounds"):
            check_growth(leaks[leak], 100, simulated)
    finally:
        for each in kept if leak == "descriptors" else ():
            os.close(each)
