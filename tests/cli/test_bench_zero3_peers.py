"""The peers of ``h2d bench zero3``: processes that take turns, and the figures made of their seconds."""

import json

import pytest

from tests.running import run_python
from transfer.cli.bench_zero3.peer_report import quartiles, show_peers, with_figures
from transfer.cli.measuring.report import console


def measured(phases, *, digest="a", now=300, before=100, pinned=None):
    """Of two ranks, of which the second is as fast or faster in each phase."""
    host = {"now": now, "before": before, "peak": 400, "pinned": pinned}
    return {
        "phases_by_rank": [phases, [[each / 2 for each in one] for one in phases]],
        "digests": [digest, digest],
        "host_bytes_by_rank": [host, host],
        "parameters": 50,
        "note": None,
    }


def test_figures_are_those_of_the_raw_seconds():
    deepspeed, ours = with_figures(
        {
            "deepspeed": measured([[1.0, 2.0, 3.0], [1.0, 2.0, 5.0], [1.0, 2.0, 9.0]]),
            "default": measured([[1.0, 1.0, 1.0], [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]], digest="b", pinned=7),
        }
    )
    assert ours["iteration_seconds"] == [3.0, 4.0, 3.0]
    assert ours["figures"] == {
        "median_forward_seconds": 1.0,
        "median_backward_seconds": 1.0,
        "median_step_seconds": 1.0,
        "median_iteration_seconds": 3.0,
        "iteration_quartiles": (3.0, 3.5),
        "times_deepspeed": 2.0,  # of 6/3, 8/4 and 12/3
        "peak_bytes": 800,
        "pinned_bytes": 14,
        "bytes_a_parameter": 8.0,  # of 2 * 200 bytes and 50 parameters
    }
    assert deepspeed["figures"]["pinned_bytes"] is None
    assert (deepspeed["right_bits"], ours["right_bits"]) == (None, False)


def test_peers_of_others_are_not_compared_bit_for_bit():
    peers = {name: measured([[1.0, 1.0, 1.0]], digest=name) for name in ("deepspeed", "offload_param", "fsdp2")}
    peers["offload_param, default"] = measured([[1.0, 1.0, 1.0]], digest="offload_param")
    verdicts = {one["variant"]: one["right_bits"] for one in with_figures(peers)}
    assert verdicts == {"deepspeed": None, "offload_param": None, "fsdp2": None, "offload_param, default": True}


def test_quartiles():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 4.0)
    assert quartiles([4.0]) == (4.0, 4.0)


def test_the_table_fits_into_80_columns(capsys):
    one = measured([[100.0, 100.0, 100.0]], now=1000)
    show_peers(console(), list(with_figures({"deepspeed": one, "offload_param, default": one})))
    table = capsys.readouterr().out.partition("Peers:")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "offload_param, default " in table


@pytest.mark.slow
def test_processes_take_turns_and_have_the_same_bits():
    done = run_python(
        *("-m", "transfer.cli", "bench", "zero3", "--accelerator", "simulated", "--layers", 1, "--hidden", 64),
        *("--sequence", 8, "--sub-groups", 3, "--steps", 2, "--threads", 1, "--optimizer", "adamw", "--strategies"),
        *("--peers", "fsdp2", "superoffload", "--json"),
        timeout=200,
        forked=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads(done.stdout)
    peers = {one["variant"]: one for one in report["peers"]}
    assert list(peers) == ["deepspeed", "default", "fsdp2"]
    assert peers["default"]["right_bits"] is True
    assert {len(one["iteration_seconds"]) for one in peers.values()} == {2}
    assert len({one["parameters"] for one in peers.values()}) == 1
    assert peers["fsdp2"]["note"].startswith("plain FSDP2 on the CPU")
    (refused,) = report["not_run"]
    assert refused == {"variant": "superoffload", "reason": "DeepSpeed's SuperOffload runs on CUDA alone."}
