"""Real training, launched on several ranks: one launch carries many specs."""

import importlib
import json
import os
import socket
import sys
from pathlib import Path

import torch

from tests.running import run_python

ROOT = Path(__file__).parents[2]
#: What the processes of ranks are forked with.
READY = "tests.zero3.ready"
#: For a launch, on a machine that does much else: some forty runs take about a minute on two idle cores.
LAUNCH_SECONDS = 1200

STAGED = {"strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 1000}}
DIRECT = {"strategy": "pinned_direct", "fallback": False}
IN_CHUNKS = {**DIRECT, "pinned_direct": {"mapped": False, "chunk_elements": 1000}}


#: Starts a script on several ranks, as torchrun does, without another import of torch and DeepSpeed for each.
FORKED_RANKS = """if True:
    import os, runpy, signal, socket, sys
    world_size, script = int(sys.argv[1]), sys.argv[2]
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.argv[:] = sys.argv[2:]
    ranks = set()
    for rank in range(world_size):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        child = os.fork()
        if child == 0:
            runpy.run_path(script, run_name="__main__")
            sys.exit(0)
        ranks.add(child)
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        if status != 0:
            for other in ranks:  # they would wait for it
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with status {os.waitstatus_to_exitcode(status)}")
"""


def run_ranks(world_size, script, environment=None):
    """Runs a script with its arguments on ``world_size`` ranks; all must end with status 0."""
    environment = {**os.environ, **(environment or {})}
    if torch.cuda.is_available():  # which does not survive a fork
        command = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}", *script)
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = run_python(*command, environment=environment, timeout=LAUNCH_SECONDS)
    else:
        done = run_python(
            "-c",
            FORKED_RANKS,
            world_size,
            *script,
            environment=environment,
            timeout=LAUNCH_SECONDS,
            forked=True,
            prepared=READY,
        )
    assert done.returncode == 0, done.stderr[-6000:]


def run_case(module, case, environment=None):
    """Runs one case of a module of ``CASES`` in a process of its own, as a single rank; it must end with status 0."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    environment = {**os.environ, **alone, **(environment or {})}
    done = run_python("-m", module, case, environment=environment, timeout=600, forked=True, prepared=READY)
    assert done.returncode == 0, done.stderr[-4000:]


def main_of(cases):
    """Calls the case that the command line names, and ends with status 0."""
    importlib.import_module(READY)
    {case.__name__: case for case in cases}[sys.argv[1]]()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort the process at its end


def launch(specs, world_size, out):
    """Trains each run of each spec of ``worker.py``, by name, on ``world_size`` ranks.

    Returns what each rank saved: a list for each run, by spec and run.
    """
    (out / "specs.json").write_text(json.dumps(specs))
    worker = Path(__file__).with_name("worker.py")
    run_ranks(world_size, [worker, out / "specs.json", out])
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
