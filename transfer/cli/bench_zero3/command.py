"""``h2d bench zero3``: the optimizer step of ZeRO-3, with every copy-back in turn."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import Parser
from ..measuring.names import DEEPSPEED
from ..measuring.options import add_common_options, choices, tell
from ..measuring.quantities import count
from ..measuring.ranks import launch, usable_cores
from .rows import CHOICES, NVME_CHOICES, NVME_PEERS, OURS, PEERS

SCHEMA_VERSION = 3

#: Options that the report repeats.
_REPORTED = ("ranks", "layers", "hidden", "limit_seconds", "sub_groups", "batch", "sequence", "steps", "optimizer")
_DESCRIPTION = """\
Trains a transformer on random tokens under ZeRO-3 with its optimizer on the
host. Measures optimizer steps and whole iterations with every copy-back, step
by step in turn, on one engine, and compares every bit.

With --peers, others train the same model too, in processes of their own. All
are alive at once and take turns, one iteration each. Model, batch, sequence,
threads, learning rate and gradient clipping are equal:

{peers}

With --nvme, optimizer state is in files, and whole engines are compared so:

{nvme_peers}
"""

_EPILOG = """\
examples:
  h2d bench zero3                          1e9 parameters on one device
  h2d bench zero3 --ranks 2 --parameters 7e9
  h2d bench zero3 --peers                  beside what you may pick instead
  h2d bench zero3 --nvme /local_nvme       with optimizer state in files
  h2d bench zero3 --json > steps.json      with every raw measurement

With DeepSpeed's CPU Adam, the first run compiles it, in one to three minutes.
Exit status: 0; 1 if a variant left wrong bits or the work failed; 2 if an
argument is wrong; 130 after Ctrl-C.
"""

_MOST_THREADS = 12  # more do not make DeepSpeed's CPU Adam faster


def main(arguments: Sequence[str]) -> int:
    """Measures steps; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    # With state in files, whole engines differ: variants of the copy-back alone take turns on one where that is asked.
    own_too = options.nvme is None or options.strategies is not None
    options.strategies = _strategies(parser, options)
    options.peers = _peers_asked(parser, options)
    options.layers, options.hidden = _shape(parser, options)
    if options.threads is None:
        options.threads = max(1, min(_MOST_THREADS, usable_cores() // options.ranks))
    nvme = None
    with contextlib.ExitStack() as cleaning:
        if options.nvme is not None:
            options.nvme, nvme = _swap_files(options, cleaning)
            options.aio = nvme["aio"]
        if options.optimizer == "cpu_adam":
            _compile_cpu_adam()
        worker = "transfer.cli.bench_zero3.worker:measure"
        began = time.monotonic()
        limit = options.limit_seconds
        # DeepSpeed's own settings of aio: with larger blocks, it keeps small sub-groups in memory.
        own = {**vars(options), "aio": None, "limit_seconds": limit / 2 if limit and options.peers else limit}
        measured: dict[str, Any] = {"measurements": [], "not_run": [], "page_lock": {"seconds_by_rank": []}}
        if own_too:
            measured = launch(worker, own, options.ranks, threads=options.threads, deepspeed=True)
        peers = _peers({**vars(options), "limit_seconds": limit and max(1, limit - (time.monotonic() - began))})
        if not own_too:
            measured |= _described(peers)
    from .report import page_lock, show, with_figures

    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "bench zero3",
        **{name: getattr(options, name) for name in _REPORTED},
        "nvme": nvme,
        **measured,
        "page_lock": page_lock(measured),
        "measurements": list(with_figures(measured["measurements"])),
        "peers": peers["measurements"],
        "not_run": [*measured["not_run"], *peers["not_run"]],
    }
    tell(report, options, functools.partial(show, wide=options.wide))
    return 0 if all(one["right_bits"] is not False for one in report["measurements"] + report["peers"]) else 1


def _peers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measures what a user would pick instead, beside DeepSpeed and this package, in processes of their own."""
    if not options["peers"] and options["nvme"] is None:
        return {"measurements": [], "not_run": []}
    from ..measuring.progress import progress
    from .peer_report import with_figures
    from .turns import take_turns

    if options["nvme"] is None:
        asked = [name for name in PEERS if name.partition(",")[0] in (DEEPSPEED, OURS, *options["peers"])]
    else:
        rows = [DEEPSPEED, OURS, *(NVME_CHOICES[name] for name in options["peers"])]
        asked = [name for name in NVME_PEERS if name in rows]
    with progress((options["steps"] + 1) * len(asked), visible=True) as advance:
        results, failed = take_turns("transfer.cli.bench_zero3.peers:measure", options, asked, advance)
    unable = [{"variant": name, "reason": one["reason"]} for name, one in results.items() if "reason" in one]
    ran = {name: results[name] for name in asked if "reason" not in results.get(name, {"reason": ""})}
    return {"measurements": list(with_figures(ran)), "not_run": [*failed, *unable]}


def _peers_asked(parser: Parser, options: argparse.Namespace) -> list[str]:
    """What of the choices is compared in processes of its own. Ends the program with status 2 where one is none."""
    choices_here = CHOICES if options.nvme is None else tuple(NVME_CHOICES)
    if options.peers is None:
        return [] if options.nvme is None else ["tuned", "pipelined"]
    for name in set(options.peers) - set(choices_here):
        parser.error(f"argument --peers: {name} is none of {', '.join(choices_here)}")
    return options.peers or list(choices_here)


def _described(peers: Mapping[str, Any]) -> dict[str, Any]:
    """The machine, and the engine whose state is in files, as the first peer that ran has described them.

    Raises:
        StrategyUnavailableError: None ran.
    """
    from ...errors import StrategyUnavailableError

    for one in peers["measurements"]:
        return {"hardware": one["hardware"], "engine": one["engine"]}
    raise StrategyUnavailableError("; ".join(f"{one['variant']}: {one['reason']}" for one in peers["not_run"]))


def _strategies(parser: Parser, options: argparse.Namespace) -> list[str]:
    """The strategies to measure. Those that read files are among them if asked for: the worker says why not."""
    from ...registry import get_strategy

    if options.nvme_pipeline and options.nvme is None:
        parser.error("--nvme-pipeline goes with --nvme DIR")
    asked = options.strategies is not None or options.nvme is not None
    return [name for name in choices(parser, options) if asked or not get_strategy(name).reads_swapped]


def _swap_files(options: argparse.Namespace, cleaning: contextlib.ExitStack) -> tuple[str, dict[str, Any]]:
    """A new directory for DeepSpeed's swap files, which goes with all that is in it, and its description.

    Raises:
        StrategyUnavailableError: DeepSpeed's aio op is not there.
        SwapError: The directory cannot be made.
    """
    from accelerators.deepspeed_aio import unavailable_reason

    from ...errors import StrategyUnavailableError
    from ...nvme.mounts import file_system
    from ...nvme.swap_directory import swap_directory
    from .nvme_peers import fastest_aio

    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed tells what it has chosen
        obstacle = unavailable_reason()
    if obstacle is not None:
        raise StrategyUnavailableError(f"--nvme needs DeepSpeed's aio op. {obstacle}")
    # Below this process's own: what is left if it is killed, the next one removes.
    own = swap_directory(options.nvme).path
    directory = cleaning.enter_context(tempfile.TemporaryDirectory(prefix="h2d-bench-", dir=own))
    print("trying settings of DeepSpeed's aio op on this drive", file=sys.stderr, flush=True)
    aio = fastest_aio(directory, usable_cores() // options.ranks)
    return directory, {"file_system": file_system(own), "pipelined": options.nvme_pipeline, "aio": aio}


def _compile_cpu_adam() -> None:
    """Compiles DeepSpeed's CPU Adam where it looks for it, before ranks wait for each other without a word.

    Raises:
        StrategyUnavailableError: It cannot be compiled, or a lock of another process stays.
    """
    from ...errors import StrategyUnavailableError
    from ..measuring import cpu_adam

    os.environ.update(cpu_adam.path_of_ninja())
    obstacle = cpu_adam.compile_once(
        lambda sentence: print(sentence, file=sys.stderr, flush=True), cpu_adam.deepspeeds_folder()
    )
    if obstacle is not None:
        raise StrategyUnavailableError(f"{obstacle} `--optimizer adamw` needs no compiler.")


def _shape(parser: Parser, options: argparse.Namespace) -> tuple[int, int]:
    """Layers and width of the model. Ends the program with status 2 where they are not well given."""
    from .on_nvme import WIDTH_MULTIPLE
    from .transformer import HEAD_WIDTH, shape_of

    multiple = HEAD_WIDTH if options.nvme is None else WIDTH_MULTIPLE

    if (options.layers is None) != (options.hidden is None):
        parser.error("--layers and --hidden go together")
    if options.layers is None:
        return shape_of(options.parameters or 10**9, multiple)
    if options.parameters is not None:
        parser.error("give either --parameters or --layers and --hidden")
    if options.hidden % multiple:
        parser.error(f"argument --hidden: expected a multiple of {multiple}, not {options.hidden}")
    return options.layers, options.hidden


def _listed(rows: Mapping[str, str]) -> str:
    """Names and what they stand for, in lines of 80 columns."""
    lines = (textwrap.wrap(what, 78 - 25) for what in rows.values())
    return "\n".join(f"  {name:<25}" + f"\n{' ' * 27}".join(each) for name, each in zip(rows, lines, strict=True))


def make_parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        prog="h2d bench zero3",
        description=_DESCRIPTION.format(peers=_listed(PEERS), nvme_peers=_listed(NVME_PEERS)),
        epilog=_EPILOG,
    )
    add_common_options(made, strategies=True)
    add = made.add_argument
    add("--parameters", type=count, metavar="N", help="of the model, about (default 1e9)")
    add("--layers", type=count, metavar="N", help="instead of --parameters, with --hidden")
    add("--hidden", type=count, metavar="N", help="width of each layer, a multiple of 64; with --nvme, of 128")
    add("--sub-groups", type=count, default=4, metavar="N", help="on each rank, at most (default 4)")
    add("--steps", type=count, default=12, metavar="N", help="of each variant (default 12)")
    peers = (
        f"also these of {', '.join(CHOICES)}, or without a name all, beside DeepSpeed and this package; all are alive "
        "at once, so each needs its host memory: some 20 bytes a parameter. "
        f"With --nvme, of {', '.join(NVME_CHOICES)} (default: tuned pipelined)"
    )
    add("--peers", nargs="*", metavar="NAME", help=peers)
    limit = "of the whole: make no more steps of each than fit in so long"
    add("--limit", type=count, metavar="SECONDS", dest="limit_seconds", help=limit)
    add("--batch", type=count, default=1, metavar="N", help="sequences on each rank (default 1)")
    add("--sequence", type=count, default=512, metavar="N", help="tokens in each (default 512)")
    optimizers = "cpu_adam: DeepSpeed's, which needs a compiler (default); adamw: torch's own"
    add("--optimizer", choices=("cpu_adam", "adamw"), default="cpu_adam", help=optimizers)
    nvme = (
        "with the optimizer's state in files in this directory (offload_optimizer.device: nvme), deleted in the end; "
        "needs DeepSpeed's aio op, which this command does not build"
    )
    add("--nvme", metavar="DIR", help=nvme)
    pipeline = "with --nvme: pipeline_read and pipeline_write, and 12 swap buffers in place of 5"
    add("--nvme-pipeline", action="store_true", help=pipeline)
    verify = "also the default with this `verify`, so that the two can be compared"
    add("--verify", choices=("sample", "full"), nargs="+", default=[], help=verify)
    return made
