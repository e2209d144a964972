"""``h2d bench``: every strategy on this machine, beside what others do and what the link allows."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from ..arguments import Parser, did_you_mean
from ..measuring.options import add_common_options, choices, tell
from ..measuring.quantities import count, dtype_name
from ..measuring.ranks import launch

SCHEMA_VERSION = 2

_DESCRIPTION = """\
Copies fp32 master partitions from the host to the device in every way that
runs here, in turn, beside what others do and what the link allows. Compares
every bit. `h2d bench zero3` measures whole steps of ZeRO-3 instead; see
`h2d bench zero3 --help`.
"""

_EPILOG = """\
examples:
  h2d bench                            three sizes, in about a minute
  h2d bench --elements 2^26 --ranks 2  one size, on two devices at once
  h2d bench --nvme /local_nvme         from files too
  h2d bench --accelerator simulated    no device: it tests bits, not speed
  h2d bench --plot rates.png           rate against size

Exit status: 0; 1 if a variant left wrong bits or the work failed; 2 if an
argument is wrong; 130 after Ctrl-C.
"""


def main(arguments: Sequence[str]) -> int:
    """Measures copies, or hands over to ``zero3``; returns the exit status."""
    if arguments and arguments[0] == "zero3":
        from ..bench_zero3.command import main as zero3_main

        return zero3_main(arguments[1:])
    parser = make_parser()
    if arguments and not arguments[0].startswith("-"):
        hint = did_you_mean(arguments[0], ["zero3"])
        parser.error(f"unknown form {arguments[0]!r}{hint or '; there is `h2d bench` and `h2d bench zero3`'}")
    options = parser.parse_args(arguments)
    options.strategies, options.file_strategies = _sources(parser, options)
    from .plot import plot, why_no_plot
    from .report import show, with_figures

    obstacle = None if options.plot is None else why_no_plot(Path(options.plot))
    if obstacle is not None:
        parser.error(f"argument --plot: {obstacle}")
    measured = launch("transfer.cli.bench_copy.worker:measure", vars(options), options.ranks, threads=options.threads)
    measurements = list(with_figures(measured["measurements"]))
    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "bench",
        "ranks": options.ranks,
        "rounds": options.rounds,
        "source_dtype": "float32",
        **measured,
        "measurements": measurements,
    }
    tell(report, options, functools.partial(show, wide=options.wide))
    if options.plot is not None:
        plot(report, Path(options.plot))
    right = all(one["right_bits"] is not False for one in measurements)
    read = options.nvme is None or any(one["from_file"] for one in measurements)
    return 0 if right and read else 1


def _sources(parser: Parser, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The strategies that copy from memory, and those that copy from files."""
    from ...registry import get_strategy
    from .variants import NVME_SWAPPED, NVME_VARIANTS

    strategies = choices(parser, options, also=NVME_VARIANTS)
    in_files = [name for name in strategies if name in NVME_VARIANTS or get_strategy(name).reads_swapped]
    in_memory = [name for name in strategies if name not in in_files]
    if options.nvme is None:
        if options.strategies is not None and in_files:
            parser.error(f"argument --strategies: {in_files[0]} copies values from files: say where with --nvme DIR")
        return in_memory, []
    return in_memory, list(dict.fromkeys([*in_files, *(NVME_VARIANTS if NVME_SWAPPED in in_files else ())]))


def make_parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        prog="h2d bench",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_common_options(made, strategies=True)
    add = made.add_argument
    sizes = "elements of the partition, such as 1000000, 1e6 or 2^28; several (default: 2^20 2^24 2^28)"
    add("--elements", type=count, nargs="+", default=[2**20, 2**24, 2**28], metavar="N", help=sizes)
    dtypes = "of the destination: bfloat16 (default), float16, float32; several"
    add("--dtypes", type=dtype_name, nargs="+", default=["bfloat16"], metavar="DTYPE", help=dtypes)
    add("--rounds", type=count, default=7, metavar="N", help="measurements of each variant (default 7)")
    add(
        "--nvme",
        metavar="DIR",
        help="also copy values from a file in this directory, read past the page cache: every variant of nvme_swapped, "
        "what DeepSpeed does, and the bare reads; each rank has a file of its own, deleted in the end",
    )
    add("--plot", metavar="FILE", help="draw rate against size into a .png, .svg or .pdf")
    return made
