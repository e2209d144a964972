"""``h2d bench zero3``: the optimizer step of ZeRO-3, with every copy-back in turn."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from ...errors import StrategyUnavailableError
from ..measuring.options import add_common_options, add_strategies_option, choices, fail, run_worker
from ..measuring.quantities import count
from ..measuring.ranks import usable_cores

SCHEMA_VERSION = 2

#: Options that the report repeats.
_REPORTED = ("sub_groups", "batch", "sequence", "steps", "optimizer", "verify_every_step")
_MOST_THREADS = 12  # more do not make DeepSpeed's CPU Adam faster


def main(arguments: Sequence[str]) -> int:
    """Measures steps; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    strategies = _strategies(parser, options)
    layers, hidden = _shape(parser, options)
    if options.threads is None:
        options.threads = max(1, min(_MOST_THREADS, usable_cores() // options.ranks))
    reported = {"layers": layers, "hidden": hidden, "limit_seconds": options.limit}
    reported.update({name: getattr(options, name) for name in _REPORTED})
    given = {name: getattr(options, name) for name in ("accelerator", "config", "nvme_pipeline")}
    nvme = None
    with contextlib.ExitStack() as cleaning:
        directory = None
        if options.nvme is not None:
            try:
                directory, nvme = _swap_files(options, cleaning)
            except (StrategyUnavailableError, OSError) as error:
                return fail(options, error)
        # In processes of its own even for one rank: DeepSpeed's accelerator and process group are the process's.
        measured = run_worker(
            "transfer.cli.bench_zero3.worker:measure",
            {**reported, **given, "strategies": strategies, "nvme": directory},
            options,
            spawn=True,
            process_group=False,
        )
    if measured is None:
        return 1
    from .report import show, with_figures

    measurements = list(with_figures(measured["measurements"]))
    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "bench zero3",
        "hardware": measured["hardware"],
        "ranks": options.ranks,
        **reported,
        "nvme": nvme,
        "engine": measured["engine"],
        "page_lock": _page_lock(measured),
        "measurements": measurements,
        "not_run": measured["not_run"],
    }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0 if all(one["right_bits"] is not False for one in measurements) else 1


def _strategies(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """The strategies to measure; those that read files only where they are asked for, to say why not."""
    from ...registry import get_strategy

    if options.nvme_pipeline and options.nvme is None:
        parser.error("--nvme-pipeline goes with --nvme DIR")
    asked = options.strategies is not None or options.nvme is not None
    return [name for name in choices(parser, options) if asked or not get_strategy(name).reads_swapped]


def _swap_files(options: argparse.Namespace, cleaning: contextlib.ExitStack) -> tuple[str, dict[str, Any]]:
    """A new directory for DeepSpeed's swap files, which goes with all that is in it, and its description.

    Raises:
        StrategyUnavailableError: DeepSpeed's aio op is not there.
        OSError: The directory cannot be made.
    """
    from accelerators.deepspeed_aio import unavailable_reason

    from ...nvme.mounts import file_system
    from ...nvme.swap_directory import swap_directory

    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed tells what it has chosen
        obstacle = unavailable_reason()
    if obstacle is not None:
        raise StrategyUnavailableError(f"--nvme needs DeepSpeed's aio op. {obstacle}")
    # Below this process's own: what is left if it is killed, the next one removes.
    own = swap_directory(options.nvme).path
    directory = cleaning.enter_context(tempfile.TemporaryDirectory(prefix="h2d-bench-", dir=own))
    return directory, {"file_system": file_system(own), "pipelined": options.nvme_pipeline}


def _page_lock(measured: dict[str, Any]) -> dict[str, Any]:
    """What it took to page-lock the sources, on the slowest rank of each round."""
    from ..measuring.statistics import slowest

    seconds = slowest(measured["page_lock"]["seconds_by_rank"])
    gib = measured["engine"]["source_bytes"] / 2**30
    per_gib = statistics.median(seconds) / gib if seconds else None
    return {**measured["page_lock"], "seconds": seconds, "seconds_per_gib": per_gib}


def _shape(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[int, int]:
    """Layers and width of the model. Ends the program with status 2 where they are not well given."""
    from .transformer import HEAD_WIDTH, Shape

    if (options.layers is None) != (options.hidden is None):
        parser.error("--layers and --hidden go together")
    if options.layers is None:
        shape = Shape.of(options.parameters or 10**9)
        return shape.layers, shape.hidden
    if options.parameters is not None:
        parser.error("give either --parameters or --layers and --hidden")
    if options.hidden % HEAD_WIDTH:
        parser.error(f"argument --hidden: expected a multiple of {HEAD_WIDTH}, not {options.hidden}")
    return options.layers, options.hidden


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="h2d bench zero3",
        description="Trains a transformer on random tokens under ZeRO-3 with its optimizer on the host, and measures "
        "optimizer steps and whole iterations with every copy-back, step by step in turn.",
        epilog="Exit status: 0; 1 where a variant left wrong bits or the work failed; 2 where the arguments are wrong.",
    )
    add_common_options(parser)
    add_strategies_option(parser)
    add = parser.add_argument
    add("--parameters", type=count, metavar="N", help="of the model, about (default 1e9)")
    add("--layers", type=count, metavar="N", help="instead of --parameters, with --hidden")
    add("--hidden", type=count, metavar="N", help="width of each layer, a multiple of 64")
    add("--sub-groups", type=count, default=4, metavar="N", help="on each rank, at most (default 4)")
    add("--steps", type=count, default=12, metavar="N", help="of each variant (default 12)")
    add("--limit", type=count, metavar="SECONDS", help="make no more steps of each than fit in so long")
    add("--batch", type=count, default=1, metavar="N", help="sequences on each rank (default 1)")
    add("--sequence", type=count, default=512, metavar="N", help="tokens in each (default 512)")
    add(
        "--optimizer",
        choices=("cpu_adam", "adamw"),
        default="cpu_adam",
        help="cpu_adam: DeepSpeed's, which needs a compiler (default); adamw: torch's own",
    )
    add(
        "--nvme",
        metavar="DIR",
        help="with the optimizer's state in files in this directory (offload_optimizer.device: nvme), deleted in the "
        "end; needs DeepSpeed's aio op, which this command does not build",
    )
    add(
        "--nvme-pipeline",
        action="store_true",
        help="with --nvme: pipeline_read and pipeline_write, and 12 swap buffers in place of 5",
    )
    add(
        "--verify-every-step",
        action="store_true",
        help="compare bits after every step, not only after the first and the last",
    )
    return parser
