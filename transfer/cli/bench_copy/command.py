"""``h2d bench``: every strategy on this machine, beside what others do and what the link allows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ..measuring.options import add_common_options, add_strategies_option, choices, run_worker
from ..measuring.quantities import count, dtype_name

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
    strategies, file_strategies = _sources(parser, options)
    if options.plot is not None:
        from .plot import why_no_plot

        obstacle = why_no_plot(options.plot)
        if obstacle is not None:
            parser.error(f"argument --plot: {obstacle}")
    given = {name: getattr(options, name) for name in ("rounds", "accelerator", "config", "nvme")}
    given.update(elements=list(dict.fromkeys(options.elements)), dtypes=list(dict.fromkeys(options.dtypes)))
    given.update(strategies=strategies, file_strategies=file_strategies)
    measured = run_worker("transfer.cli.bench_copy.worker:measure", given, options)
    if measured is None:
        return 1
    from .report import show, with_figures

    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "bench",
        "hardware": measured["hardware"],
        "ranks": options.ranks,
        "rounds": options.rounds,
        "source_dtype": "float32",
        "nvme": measured["nvme"],
        "measurements": list(with_figures(measured["measurements"])),
        "not_run": measured["not_run"],
    }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    if options.plot is not None:
        from .plot import plot

        plot(report, options.plot)
    right = all(one["right_bits"] is not False for one in report["measurements"])
    read = options.nvme is None or any(one["from_file"] for one in report["measurements"])
    return 0 if right and read else 1


def _sources(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The strategies that copy from memory, and those that copy from files."""
    from .variants import NVME_VARIANTS, reads_files, with_variants

    strategies = choices(parser, options, also=NVME_VARIANTS)
    in_files = [name for name in strategies if reads_files(name)]
    if options.nvme is None and options.strategies is not None and in_files:
        parser.error(f"argument --strategies: {in_files[0]} copies values from files: say where with --nvme DIR")
    in_memory = [name for name in strategies if name not in in_files]
    return in_memory, with_variants(in_files) if options.nvme is not None else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="h2d bench",
        description="Copies fp32 master partitions from the host to the device in every way that runs here, in turn; "
        "with --nvme also from files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_options(parser)
    add_strategies_option(parser)
    add = parser.add_argument
    sizes = [2**20, 2**24, 2**28]
    add(
        "--elements",
        type=count,
        nargs="+",
        default=sizes,
        metavar="N",
        help="elements of the partition, such as 1000000, 1e6 or 2^28; several (default: 2^20 2^24 2^28)",
    )
    add(
        "--dtypes",
        type=dtype_name,
        nargs="+",
        default=["bfloat16"],
        metavar="DTYPE",
        help="of the destination: bfloat16 (default), float16, float32; several",
    )
    add("--rounds", type=count, default=7, metavar="N", help="measurements of each variant (default 7)")
    add(
        "--nvme",
        metavar="DIR",
        help="also copy values from a file in this directory, read past the page cache: nvme_swapped in every form, "
        "what DeepSpeed does, and the bare reads; each rank has a file of its own, deleted in the end",
    )
    add("--plot", type=Path, metavar="FILE", help="draw rate against size into a .png, .svg or .pdf")
    return parser
