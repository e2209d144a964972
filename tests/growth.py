"""What a process holds, before and after the same work was done many times over.

Tests marked ``long`` do it as often as a long run does. Others of the same do it a few hundred times, and see what
grows by as much as eight blocks of Python's memory in each round.
"""

import gc
import itertools
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

MEBIBYTE = 2**20
#: How often Python's memory is looked at, and the most blocks that looking and caches take in a short run.
PARTS, MEASURING_BLOCKS = 4, 150


@dataclass(frozen=True)
class Held:
    """What this process holds now.

    Attributes:
        blocks: Of Python's own memory.
        resident_bytes: Of all memory.
        descriptors: Open files.
        threads: Of the system.
        pinned_bytes: Of the accelerator.
    """

    blocks: int
    resident_bytes: int
    descriptors: int
    threads: int
    pinned_bytes: int

    @classmethod
    def now(cls, accelerator):
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors, threads = (len(list(Path("/proc/self", each).iterdir())) for each in ("fd", "task"))
        return cls(sys.getallocatedblocks(), resident, descriptors, threads, accelerator.pinned_bytes)

    def since(self, before):
        return {name: number - getattr(before, name) for name, number in asdict(self).items()}


def check_growth(work, number, accelerator):
    """Does ``work`` until it holds what it needs, and then ``number`` times; what it holds then must be the same.

    Python's own memory is looked at four times in between: what leaks grows each time, and what is cached does not.
    Resident memory may grow by 8 MiB. Writes what was measured to the standard output.
    """
    for _ in range(min(300, max(50, number // 4))):
        work()
    Held.now(accelerator)  # what the first one leaves
    looks, started = [Held.now(accelerator)], time.perf_counter()
    for _ in range(PARTS):
        for _ in range(number // PARTS):
            work()
        looks.append(Held.now(accelerator))
    seconds = time.perf_counter() - started
    grown = looks[-1].since(looks[0])
    blocks = [after.blocks - before.blocks for before, after in itertools.pairwise(looks)]
    line = f"{number} rounds in {seconds:.1f} s, {seconds / number * 1e6:.0f} us each; grown: {grown}, blocks: {blocks}"
    sys.stdout.write(line + "\n")
    assert min(blocks) <= MEASURING_BLOCKS + number / PARTS / 10, line
    assert grown["resident_bytes"] <= 8 * MEBIBYTE, line
    assert max(grown["descriptors"], grown["threads"], grown["pinned_bytes"]) <= 0, line  # others' threads may end


def rounds(few, many):
    """Parametrizes a test with ``number``: a few rounds, and many in the test that is marked ``long``."""
    marks = (pytest.mark.long, pytest.mark.timeout(3600))
    return pytest.mark.parametrize("number", [few, pytest.param(many, marks=marks)])
