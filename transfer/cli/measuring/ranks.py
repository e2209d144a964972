"""Runs a measurement in one process, or on several ranks of this host at once.

A worker is a function ``worker(options, ranks) -> result`` at the top of a module. Options and result
are what JSON can hold. Every rank calls it; what rank 0 returns is the result.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Ranks:
    """The ranks that measure together. Without a process group it stands for a single one."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def barrier(self) -> None:
        """Blocks until every rank is here."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.barrier()

    def start(self, accelerator: Any) -> float:
        """The time at which every rank begins what follows, with nothing left to do on its device."""
        accelerator.synchronize()
        self.barrier()
        return time.perf_counter()

    def largest(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """For each key the largest value of any rank; None where no rank has one."""
        every = self.gather(dict(own))
        return {key: max((one[key] for one in every if one[key] is not None), default=None) for key in own}

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank, in order. Blocks until all have given theirs."""
        if self.size == 1:
            return [value]
        import torch.distributed

        values = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values


class RanksFailedError(RuntimeError):
    """A rank ended with an error, which it has printed."""


def launch(
    worker: str,
    options: Mapping[str, Any],
    ranks: int = 1,
    *,
    threads: int | None = None,
    deepspeed: bool = False,
) -> Any:
    """Runs a worker on ``ranks`` processes and returns what it returned on rank 0.

    Args:
        worker: ``"module:function"``.
        options: Handed to the worker as they are.
        ranks: How many. One runs in this process.
        threads: Host threads of each rank; None: torch's choice for one rank, the cores shared out for several.
        deepspeed: The worker makes DeepSpeed's accelerator and process group, which are the process's: one rank has
            a process of its own too. Otherwise several ranks find a gloo process group.

    Raises:
        RanksFailedError: A rank failed.
    """
    if ranks == 1 and not deepspeed:
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        with contextlib.redirect_stdout(sys.stderr):  # where libraries log; the standard output is for the result
            return _function(worker)(dict(options), Ranks())
    share = threads if threads is not None else max(1, usable_cores() // ranks)
    given = json.dumps({"worker": worker, "options": dict(options), "process_group": not deepspeed})
    with tempfile.TemporaryDirectory(prefix="h2d-") as directory:
        result = Path(directory, "result.json")
        status = _run([sys.executable, "-m", __name__, given, str(result)], ranks, share)
        if status != 0 or not result.exists():
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
            raise RanksFailedError(f"{worker} failed on {ranks} ranks (one {how}); see above")
        return json.loads(result.read_text())


def _run(command: list[str], ranks: int, threads: int) -> int:
    """Runs a command as every rank until all have ended, or one has failed; returns the status of the first that has.

    The variables are those that launchers set. Nothing of the ranks is left, also after Ctrl-C.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    of_all = {**os.environ, **place, "OMP_NUM_THREADS": str(threads)}
    of_all.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            variables = {**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # What ranks and libraries print goes to the standard error (2): the result alone is for the caller.
            # In a session of its own, so that Ctrl-C reaches this process alone.
            started.append(subprocess.Popen(command, env=variables, stdout=2, start_new_session=True))
        while True:
            ended = [process.poll() for process in started]
            if any(ended) or None not in ended:
                return next(filter(None, ended), 0)
            time.sleep(0.02)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # and what it has started
        for process in started:
            process.wait()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _function(worker: str) -> Callable[[dict[str, Any], Ranks], Any]:
    module, _, name = worker.partition(":")
    function: Callable[[dict[str, Any], Ranks], Any] = getattr(importlib.import_module(module), name)
    return function


def _one_rank() -> None:
    spec, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    import torch
    import torch.distributed

    from accelerators import get_accelerator

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    name = spec["options"].get("accelerator")
    accelerator = get_accelerator(name)
    if spec["process_group"]:
        torch.distributed.init_process_group("gloo")
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    # Each rank has a device of its own: entering a stream makes its device current.
    with accelerator.stream(accelerator.current_stream(int(os.environ["LOCAL_RANK"]))):
        returned = _function(spec["worker"])(spec["options"], ranks)
    if ranks.rank == 0:
        result.write_text(json.dumps(returned))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    # Without the end of the process that Python would make: in it, and where a group is destroyed, threads of
    # gloo abort the process now and then ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _one_rank()
