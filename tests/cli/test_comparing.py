"""``h2d run --compare``: whose turn each step is, what is made of the seconds, and real trainings."""

import json
import re
import textwrap
import types

import pytest

from tests.running import ROOT, run_python
from transfer import cli
from transfer.cli.comparing import report
from transfer.cli.comparing.comparison import Comparison
from transfer.cli.comparing.turns import DEEPSPEED, OURS, Turn, turns


def test_blocks_alternate_and_what_follows_a_change_is_not_counted():
    ours, deepspeed, first = Turn(OURS, None), Turn(DEEPSPEED, None), Turn(OURS, 0)
    assert turns(1) == [ours, ours, first, deepspeed, Turn(DEEPSPEED, 0)]
    assert turns(6) == [
        *(ours, ours, *[Turn(OURS, 0)] * 3),
        *(deepspeed, *[Turn(DEEPSPEED, 0)] * 3, *[Turn(DEEPSPEED, 1)] * 3),
        *(ours, *[Turn(OURS, 1)] * 3),
    ]


@pytest.mark.parametrize("steps", range(1, 30))
def test_each_way_has_its_steps_in_pairs_of_equal_blocks(steps):
    found = turns(steps)
    for way in (OURS, DEEPSPEED):
        assert sum(turn.way == way and turn.pair is not None for turn in found) == steps
    for pair in {turn.pair for turn in found} - {None}:
        sizes = [sum(turn == Turn(way, pair) for turn in found) for way in (OURS, DEEPSPEED)]
        assert sizes[0] == sizes[1] <= 4


class Device:
    name = "a device"

    def synchronize(self):
        self.times = getattr(self, "times", 0) + 1


class Engine:
    """One whose ``step`` updates nothing where its loss scale was too large, and in micro-steps."""

    skipped_steps = 0
    boundary = True

    def is_gradient_accumulation_boundary(self):
        return self.boundary

    def skips(self):
        self.skipped_steps += 1


def test_steps_that_update_nothing_are_made_and_not_counted(monkeypatch):
    made, changed, engine = [], [], Engine()
    comparison = Comparison(1, made.append, None)
    comparison._transfer = types.SimpleNamespace(accelerator=Device())
    monkeypatch.setattr(comparison, "_is_ours", lambda engine: True)
    monkeypatch.setattr(comparison, "_compare_bits", lambda engine: made.append("compared"))
    monkeypatch.setattr(comparison, "_change", lambda engine, way: changed.append(way))
    monkeypatch.setattr(comparison, "_tell", lambda ranks: made.append("told"))
    engine.boundary = False
    assert comparison.step(engine, lambda: "a micro-step") == "a micro-step"
    engine.boundary = True
    for _ in range(3):
        comparison.step(engine, engine.skips)
    assert (made, changed, comparison._at) == ([], [], 0)
    # Of five turns, the third and the last are counted.
    for at in range(5):
        comparison.step(engine, engine.skips)
        assert comparison.step(engine, lambda: "a step") == "a step"
        assert comparison._at == at + 1
    assert made == ["compared", "compared", "told"]
    assert changed == [DEEPSPEED, OURS]
    assert [each[:2] for each in comparison._counted] == [(OURS, 0), (DEEPSPEED, 0)]
    times = comparison._transfer.accelerator.times
    comparison.step(engine, lambda: "after it")
    assert comparison._transfer.accelerator.times == times, "nothing is waited for any more"


def of_rank(*counted, **changes):
    bits = {"compared_steps": 4, "compared_partitions": 8, "partitions_that_differ": 0, "not_compared": None}
    return {"counted": counted, **bits, **changes}


#: Two pairs; the second rank is slower in one step of ours.
FIRST = of_rank(
    (OURS, 0, 1.0, 2.0),
    (DEEPSPEED, 0, 3.0, 4.0),
    (DEEPSPEED, 0, 5.0, 6.0),
    (DEEPSPEED, 1, 4.0, 6.0),
    (OURS, 1, 1.0, 2.0),
)
SECOND = of_rank(
    (OURS, 0, 0.5, 2.0),
    (DEEPSPEED, 0, 3.0, 4.0),
    (DEEPSPEED, 0, 5.0, 6.0),
    (DEEPSPEED, 1, 4.0, 6.0),
    (OURS, 1, 2.0, 3.0),
)


@pytest.fixture
def described(monkeypatch):
    hardware = {"device": "x", "accelerator": "cuda", "cpu": "y", "cores": 2, "threads": 1, "torch": "2"}
    monkeypatch.setattr(report, "describe", lambda _: {**hardware, "deepspeed": "0.19", "date": "2026-12-01"})


def test_figures_are_those_of_the_slowest_rank_and_ratios_those_of_pairs(described):
    result = report.make([FIRST, SECOND], Device())
    assert (result["schema_version"], result["ranks"]) == (1, 2)
    deepspeed, ours = result["ways"]
    assert (deepspeed["way"], deepspeed["steps"], deepspeed["pairs"]) == (DEEPSPEED, 3, [0, 0, 1])
    assert ours["all_step_seconds"] == [1.0, 2.0]
    assert (ours["step_seconds"], ours["iteration_seconds"]) == (1.5, 2.5)
    assert deepspeed["step_seconds"] == 4.0
    assert deepspeed["step_spread_percent"] == pytest.approx(100 * (4.5 - 3.5) / 4)
    # Pair 0: the median of 3 and 5 over 1; pair 1: 4 over 2. Of iterations: 5 over 2, 6 over 3.
    assert result["times_faster"] == {"step": [4.0, 2.0], "iteration": [2.5, 2.0]}
    assert result["bits"] == {
        "equal": True,
        "steps": 4,
        "partitions": 16,
        "partitions_that_differ": 0,
        "not_compared": None,
    }


def test_bits_that_differ_on_one_rank_are_said(described, capsys):
    result = report.make([FIRST, of_rank(*SECOND["counted"], partitions_that_differ=1)], Device())
    assert result["bits"]["equal"] is False
    report.tell(result, print, None)
    out, err = capsys.readouterr()
    assert out == ""
    assert "bits: WRONG" in err
    assert " 1 differ." in err
    assert max(map(len, err.splitlines())) <= 80


def test_bits_that_could_not_be_compared_are_not_called_equal(described, capsys):
    result = report.make([FIRST, of_rank(*SECOND["counted"], not_compared="no file")], Device())
    assert result["bits"]["equal"] is None
    report.tell(result, print, None)
    err = capsys.readouterr().err
    assert "bits: not compared: no file" in err
    assert "equal" not in err


def test_a_file_that_cannot_be_written_is_said(described, tmp_path):
    said = []
    report.tell(report.make([FIRST, SECOND], Device()), said.append, str(tmp_path / "none/x.json"))
    assert "cannot be written" in said[0]


@pytest.mark.parametrize("arguments", [["--json", "x.json", "train.py"], ["--compare", "0", "train.py"]])
def test_wrong_arguments(arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *arguments])
    assert ended.value.code == 2


def test_variables_for_other_launchers(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--print-env", "--compare", "3", "--json", "out.json"]) == 0
    out = capsys.readouterr().out
    assert "export H2D_COMPARE=3\n" in out
    assert f"export H2D_COMPARE_JSON={tmp_path}/out.json\n" in out


#: Trains a tiny model, with two micro-steps an iteration, and says before each step whether it is attached, how much is
#: pinned, and in the end what the weights are.
SCRIPT = """
import hashlib, os, sys, warnings
import deepspeed, torch
from accelerators.simulated import SimulatedAccelerator

warnings.filterwarnings("ignore", category=FutureWarning)
simulated = SimulatedAccelerator()
deepspeed.accelerator.set_accelerator(simulated.as_deepspeed())
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 1))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "sub_group_size": 200_000, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 10**9,
}
engine = deepspeed.initialize(model=model, config=config)[0]
for partition in engine.optimizer.fp16_partitioned_groups_flat:
    simulated.adopt(partition)
if "wrong" in sys.argv:
    from tests.cli.strategies import WrongInOneBit
    from transfer import zero3
    zero3.attach(engine, WrongInOneBit(accelerator=simulated))
if "refusing" in sys.argv:
    from transfer import StrategyUnavailableError, zero3
    attach, times = zero3.attach, []
    def refusing(*given):
        times.append(given)
        if len(times) > 1:
            raise StrategyUnavailableError("no more page-locks")
        return attach(*given)
    zero3.attach = refusing
    zero3.attach(engine)
rank = torch.distributed.get_rank()
generator = torch.Generator().manual_seed(rank)
if "older" in sys.argv:
    attached = lambda: None
else:
    from transfer.zero3.attachments import attachments
    attached = lambda: attachments.get(engine.optimizer) is not None
states = []
for _ in range(int(sys.argv[1])):
    for _ in range(2):
        loss = engine(torch.rand(2, 600, generator=generator).bfloat16()).float().square().mean()
        engine.backward(loss)
        masters = engine.optimizer.fp32_partitioned_groups_flat
        states.append((attached(), any(simulated.is_pinned(each) for each in masters)))
        engine.step()
digest = hashlib.sha256()
for partition in (*engine.optimizer.fp16_partitioned_groups_flat, *engine.optimizer.fp32_partitioned_groups_flat):
    digest.update(partition.detach().contiguous().view(torch.uint8).numpy())
engine.destroy()
lines = f"states {rank} {states}", f"digest {rank} {digest.hexdigest()}", f"pinned {rank} {simulated.pinned_bytes}", ""
os.write(1, "\\n".join(["", *lines]).encode())  # in one piece, as other ranks write too
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("compared") / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(script, *arguments, before=(), environment=PLACE):
    command = ("-m", "transfer.cli", "run", *before, script) if before else ("-c", script.read_text())
    done = run_python(*command, *arguments, environment=environment, path=[ROOT], forked=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def printed(done, what, rank=0):
    return re.search(rf"^{what} {rank} (.*)$", done.stdout, re.MULTILINE)[1]


@pytest.mark.slow
def test_a_training_is_the_same_and_its_steps_are_compared(script, tmp_path):
    """Two steps of each in 7 of the script, of 9: ours, ours, 2 ours, DeepSpeed, 2 DeepSpeed; then ours again."""
    file = tmp_path / "result.json"
    done = run(script, "9", before=("--compare", "2", "--json", str(file)))
    states = eval(printed(done, "states"))
    # The script has let the simulator adopt partitions after the engine was attached, so the first step page-locks.
    assert states[:2] == [(True, False)] * 2
    assert states[2:] == [*[(True, True)] * 2 * 3, *[(False, False)] * 2 * 3, *[(True, True)] * 2 * 2]
    assert printed(done, "digest") == printed(run(script, "9", "older"), "digest")
    assert printed(done, "pinned") == "0"
    said = [line for line in done.stderr.splitlines() if line.startswith("h2d run: ")]
    assert "compares 2 steps of each way, in 7 steps of the script" in done.stderr
    assert len([line for line in said if "sub-groups of a ZeRO-3 engine" in line]) == 1, (
        "nothing is said at each change"
    )
    assert "bits: equal. After each of 4 counted steps" in done.stderr
    assert "There is no device here" in done.stderr
    result = json.loads(file.read_text())
    partitions = int(re.search(r"serves \d+ of (\d+) sub-groups", done.stderr)[1])
    assert partitions > 1
    assert result["bits"] == {
        "equal": True,
        "steps": 4,
        "partitions": 4 * partitions,
        "partitions_that_differ": 0,
        "not_compared": None,
    }
    assert [one["steps"] for one in result["ways"]] == [2, 2]
    for one in result["ways"]:
        pairs = zip(one["all_step_seconds"], one["all_iteration_seconds"], strict=True)
        assert all(0 < step < iteration for step, iteration in pairs)


@pytest.mark.slow
def test_wrong_bits_are_found_and_a_script_that_ends_too_early_is_told_what_there_is(script):
    """Five of each take 14 steps: ours 2 and 3, DeepSpeed 1, 3 and 2, ours 1 and 2. The script makes 12."""
    done = run(script, "12", "wrong", before=("--compare", "5"))
    assert "the script has made 12 of the 14 steps that --compare 5 takes: of this rank alone" in done.stderr
    assert "bits: WRONG" in done.stderr
    assert "median of 1 pair of blocks" in done.stderr


@pytest.mark.slow
def test_what_fails_when_ways_change_ends_the_comparison_and_no_training(script):
    """Five of each take 14 steps, the last three of which are ours: it is to be attached again then."""
    done = run(script, "15", "refusing", before=("--compare", "5"))
    assert "cannot compare" in done.stderr
    assert "no more page-locks" in done.stderr
    assert "bits:" not in done.stderr
    assert eval(printed(done, "states"))[-1] == (False, False)


@pytest.mark.slow
def test_ranks_take_turns_together(script, tmp_path):
    file = tmp_path / "result.json"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = run(script, "5", before=("--compare", "1", "--json", str(file), *launcher), environment={})
    result = json.loads(file.read_text())
    assert result["ranks"] == 2
    assert result["bits"]["equal"] is True
    assert done.stderr.count("bits: equal") == 1, "rank 0 speaks"
    assert printed(done, "states", 0) == printed(done, "states", 1)
