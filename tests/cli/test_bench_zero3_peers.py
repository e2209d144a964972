"""``h2d bench zero3 --peers``: what a user may pick instead, in processes that take turns."""

import json
import time

import pytest

from transfer import cli
from transfer.cli.bench_zero3 import command, peers
from transfer.cli.measuring.ranks import RanksFailedError

TINY = ["--accelerator", "simulated", "--layers", "1", "--hidden", "64", "--sequence", "8", "--optimizer", "adamw"]


def round_of(forward, backward, step, host_bytes=700):
    return {"seconds": {"forward": forward, "backward": backward, "step": step}, "host_bytes": host_bytes}


MEASURED = {
    "parameters": 100,
    "peers": {
        "deepspeed": [round_of([1, 1, 1], [2, 2, 2], [3, 7, 5]), round_of([1, 1, 1], [2, 2, 2], [8, 9, 10])],
        "fsdp2": [round_of([1, 1, 1], [1, 1, 1], [2, 2, 2], 500), round_of([1, 1, 1], [1, 1, 1], [2, 2, 4], 700)],
    },
}


def test_figures_by_hand():
    deepspeed, fsdp2 = peers.with_figures(MEASURED, ranks=2)
    # Iterations of 6, 10, 8 seconds and of 11, 12, 13; and of 4, 4, 4 and 4, 4, 6.
    assert deepspeed["figures"]["iteration"] == 10.5
    assert deepspeed["figures"]["quartiles"] == [8.5, 10.5, 11.75]
    assert deepspeed["figures"]["spread_percent"] == pytest.approx(100 * 3.25 / 10.5)
    assert deepspeed["figures"]["times_deepspeed"] == 1
    assert [deepspeed["figures"][phase] for phase in ("forward", "backward", "step")] == [1, 2, 7.5]
    assert fsdp2["figures"]["times_deepspeed"] == (8 / 4 + 12 / 4) / 2, "medians of rounds, round by round"
    assert fsdp2["figures"]["host_bytes_per_parameter"] == 2 * 600 / 100


def test_without_deepspeed_there_are_no_ratios():
    (only,) = peers.with_figures({"parameters": 1, "peers": {"fsdp2": MEASURED["peers"]["fsdp2"]}}, ranks=1)
    assert only["figures"]["times_deepspeed"] is None


def test_a_peer_that_cannot_run_is_left_out_of_later_rounds(monkeypatch, capsys):
    asked = []

    def launch(worker, options, ranks, **how):
        asked.append(options["peer"])
        if options["peer"] == "superoffload":
            raise RanksFailedError("no such device")
        return {"hardware": None, "parameters": 100, **round_of([1], [1], [1])}

    monkeypatch.setattr(peers, "launch", launch)
    arguments = ["bench", "zero3", *TINY, "--rounds", "2", "--json", "--peers", "deepspeed", "superoffload"]
    assert cli.main(arguments) == 0
    assert asked == ["deepspeed", "superoffload", "deepspeed"]
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["not_run"] == [{"peer": "superoffload", "reason": "no such device"}]
    assert [len(one["rounds"]) for one in report["peers"]] == [2]
    assert "round 2 of 2: deepspeed" in printed.err


def test_rounds_end_with_the_limit(monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    one = {"hardware": None, "parameters": 100, **round_of([1], [1], [1])}
    monkeypatch.setattr(peers, "launch", lambda *given, **how: one)
    arguments = ["bench", "zero3", *TINY, "--rounds", "9", "--limit", "25", "--json", "--peers", "deepspeed"]
    assert cli.main(arguments) == 0
    assert len(json.loads(capsys.readouterr().out)["peers"][0]["rounds"]) == 2, "a third would end after 30 s"


def test_every_peer_has_a_name_on_the_command_line():
    assert tuple(peers.PEERS) == command._PEERS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_training(capsys):
    names = ["deepspeed", "default", "offload_param, default", "fsdp2"]
    assert cli.main(["bench", "zero3", *TINY, "--steps", "2", "--rounds", "1", "--peers", *names]) == 0
    table = capsys.readouterr().out
    for name in names:
        assert f"\n{name} " in table
    assert "not run" not in table
    assert max(len(line.rstrip()) for line in table.splitlines() if "Medians" not in line and "cores" not in line) <= 80
