"""The lines that say what engines are served with, on stand-ins; ``tests/cli/test_below_run.py`` has real ones."""

import gc
import re

import pytest

from tests.running import run_program, succeeds
from tests.zero3.stand_ins import Spy, SteppingStage3, engine_of
from transfer import build_transfer, zero3
from transfer.stats import format_bytes
from transfer.zero3 import summary


class Overlapping(SteppingStage3):
    """Copies masters back by itself, as ZenFlow's step does where it overlaps."""

    zenflow = True

    def step(self, closure=None):
        self._post_step(set())


@pytest.fixture
def said(monkeypatch):
    """What is said; what is told of engines is the line ``engine``."""
    lines = []
    monkeypatch.setattr(summary, "_process", summary._Process())
    summary.speak(lines.append, lambda: lines.append("engine"))
    return lines


def train(optimizer, transfer, steps=1):
    engine = engine_of(optimizer)
    zero3.attach(engine, transfer)
    for _ in range(steps):
        optimizer.step()
    return engine


def untimed(line):
    return re.sub(r"\d+\.\d\d s", "TIME s", line)


PAGEABLE = {"strategy": "pageable"}
#: What any engine with an offloaded optimizer has besides copy-backs.
ALSO = "; also restore, reload_states"


def test_the_first_line_and_the_last(said, simulated):
    train(SteppingStage3(simulated), build_transfer(PAGEABLE, simulated), steps=3)
    assert said == ["engine", "serves 2 of 2 sub-groups of a ZeRO-3 engine by pageable, 0 bytes page-locked" + ALSO]
    assert summary.end()
    assert untimed(said[2]) == "6 copies (6 pageable), 96 bytes, TIME s waited; served 6 of 6 copy-backs"
    assert summary.end()
    assert len(said) == 3, "once"


def test_page_locked_bytes_are_said(said, simulated):
    train(SteppingStage3(simulated), build_transfer({"strategy": "pinned_direct"}, simulated))
    assert said[1] == "serves 2 of 2 sub-groups of a ZeRO-3 engine by pinned_direct, 64 bytes page-locked" + ALSO


def test_without_an_engine_nothing_is_said(said):
    assert not summary.end()
    assert said == []


def test_what_serves_nothing_says_why(said, simulated):
    train(Overlapping(simulated, sub_groups=4), build_transfer(PAGEABLE, simulated), steps=3)
    summary.end()
    assert said[-1] == "served 0 of 12 copy-backs: ZenFlow overlaps its own"


def test_masters_that_are_not_on_the_host(said, simulated):
    optimizer = SteppingStage3(simulated)
    optimizer.fp32_partitioned_groups_flat[1] = optimizer.fp16_partitioned_groups_flat[1].float()
    simulated.adopt(optimizer.fp32_partitioned_groups_flat[1])
    train(optimizer, build_transfer(PAGEABLE, simulated), steps=2)
    summary.end()
    assert said[1].startswith(
        "serves 1 of 2 sub-groups of a ZeRO-3 engine by pageable, 0 bytes page-locked; left alone: 1, as "
    )
    assert said[1].endswith("the masters are on cpu, the low-precision partitions on cpu" + ALSO)
    assert "served 2 of 4 copy-backs: the masters are on " in said[-1]


def test_partitions_that_are_offloaded(said, simulated):
    optimizer = SteppingStage3(simulated)
    optimizer.offload_param = True
    train(optimizer, build_transfer(PAGEABLE, simulated))
    summary.end()
    assert said[1].endswith("; DeepSpeed's own: parameter fetch")
    reason = "the low-precision partition is offloaded, or is the master itself"
    assert said[-1] == f"served 0 of 2 copy-backs: {reason}"


def test_what_an_engine_has_of_other_copies(said, simulated):
    optimizer = Overlapping(simulated)
    vars(optimizer).update(zenflow_overlap_step=True, use_muon=True)
    train(optimizer, build_transfer(PAGEABLE, simulated))
    also, left = said[1].split("; ")[-2:]
    assert also == "also ZenFlow's copy-back, Muon's momentum, restore, reload_states"
    assert left == "DeepSpeed's own: gradients of SuperOffload and ZenFlow, ZenFlow's selected columns"


def test_an_engine_that_made_no_step(said, simulated):
    train(SteppingStage3(simulated), build_transfer(PAGEABLE, simulated), steps=0)
    summary.end()
    assert said[-1] == "a ZeRO-3 engine was made, which made no step"


def test_two_engines_of_one_transfer_are_counted_once(said, simulated):
    transfer = build_transfer(PAGEABLE, simulated)
    engines = [train(SteppingStage3(simulated), transfer) for _ in range(2)]
    summary.end()
    assert said[-1].startswith("4 copies (4 pageable), 64 bytes")
    assert said.count("engine") == 1
    del engines


def test_counts_outlive_the_engine_and_keep_nothing_alive(said, simulated):
    transfer = Spy(simulated)
    engine = train(SteppingStage3(simulated), transfer)
    other = train(SteppingStage3(simulated), PAGEABLE)
    zero3.detach(engine)
    zero3.detach(other)
    record = summary._process.records[0]
    del transfer, engine, other
    gc.collect()
    assert record.transfer() is None
    summary.end()
    assert "served 4 of 4 copy-backs" in said[-1]


def test_other_ranks_are_silent(said, simulated, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    train(SteppingStage3(simulated), build_transfer(PAGEABLE, simulated))
    assert summary.end()
    assert said == ["engine"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536 * 2**20, "1.5 GiB"), (2**52, "4096 TiB")],
)
def test_bytes(count, text):
    assert format_bytes(count) == text


def test_a_process_of_multiprocessing_says_its_last_line_too():
    """A forked one ends without ``atexit``."""
    program = """
    import multiprocessing, os
    from accelerators.simulated import SimulatedAccelerator
    from tests.zero3.stand_ins import SteppingStage3, engine_of
    from transfer import build_transfer, zero3
    from transfer.zero3 import summary
    def work():
        summary.speak(lambda line: print(line, flush=True), lambda: None)
        simulated = SimulatedAccelerator()
        optimizer = SteppingStage3(simulated)
        zero3.attach(engine_of(optimizer), build_transfer({"strategy": "pageable"}, simulated))
        optimizer.step()
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    """
    done = run_program(program)
    done.stdout = untimed(done.stdout)
    lines = [
        f"serves 2 of 2 sub-groups of a ZeRO-3 engine by pageable, 0 bytes page-locked{ALSO}\n",
        "2 copies (2 pageable), 32 bytes, TIME s waited; served 2 of 2 copy-backs\n",
    ]
    succeeds(done, stdout="".join(lines))
