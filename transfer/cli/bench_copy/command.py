"""``h2d bench``: every strategy on this machine, beside what others do and what the link allows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..measuring.options import add_common_options, choices, tell
from ..measuring.quantities import count, dtype_name
from ..measuring.ranks import launch

SCHEMA_VERSION = 2

_EPILOG = """\
`h2d bench zero3` measures whole optimizer steps of ZeRO-3; `h2d bench zero3 --help` lists its options.
Exit status: 0; 1 where a variant left wrong bits or the work failed; 2 where the arguments are wrong.
"""


def main(arguments: Sequence[str]) -> int:
    """Measures copies, or hands over to ``zero3``; returns the exit status."""
    if arguments and arguments[0] == "zero3":
        from ..bench_zero3.command import main as zero3_main

        return zero3_main(arguments[1:])
    parser = _parser()
    if arguments and not arguments[0].startswith("-"):
        parser.error(f"unknown form {arguments[0]!r}; there is `h2d bench` and `h2d bench zero3`")
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
    tell(report, options, show)
    if options.plot is not None:
        plot(report, Path(options.plot))
    right = all(one["right_bits"] is not False for one in measurements)
    read = options.nvme is None or any(one["from_file"] for one in measurements)
    return 0 if right and read else 1


def _sources(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[list[str], list[str]]:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="h2d bench",
        description="Copies fp32 master partitions from the host to the device in every way that runs here, in turn; "
        "with --nvme also from files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_options(parser, strategies=True)
    add = parser.add_argument
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
    return parser
