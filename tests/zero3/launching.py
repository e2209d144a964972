"""Real training, launched on several ranks: one launch carries many specs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
#: For a launch, on a machine that does much else: some forty runs take about a minute on two idle cores.
LAUNCH_SECONDS = 1200

STAGED = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 1000}}
DIRECT = {"strategy": "pinned_direct", "fallback": False}
IN_CHUNKS = {**DIRECT, "pinned_direct": {"mapped": False, "chunk_elements": 1000}}


def launch(specs, world_size, out):
    """Trains each run of each spec of ``worker.py``, by name, on ``world_size`` ranks.

    Returns what each rank saved: a list for each run, by spec and run.
    """
    (out / "specs.json").write_text(json.dumps(specs))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    command += [str(Path(__file__).with_name("worker.py")), str(out / "specs.json"), str(out)]
    done = subprocess.run(command, env=environment, timeout=LAUNCH_SECONDS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return {
        name: {
            run["name"]: [torch.load(out / f"{name}-{run['name']}-{rank}.pt") for rank in range(world_size)]
            for run in spec["runs"]
        }
        for name, spec in specs.items()
    }


def same(got, expected):
    """What two ranks saved is the same, bit for bit."""
    assert got["digest"] == expected["digest"]
    assert got["losses"] == expected["losses"]
    for what in ("partitions", "parameters", "seen"):
        assert len(got[what]) == len(expected[what])
        assert all(torch.equal(*pair) for pair in zip(got[what], expected[what], strict=True)), what


def all_same(results):
    """Every run is the same as the one called ``deepspeed``, rank by rank."""
    for got in results.values():
        for mine, theirs in zip(got, results["deepspeed"], strict=True):
            same(mine, theirs)
