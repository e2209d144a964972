"""What both forms of ``h2d bench`` take from the command line, and how they start their worker."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

from .quantities import count
from .ranks import RanksFailedError, launch


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every measurement has."""
    parser.add_argument("--ranks", type=count, default=1, metavar="N", help="processes at the same time (default 1)")
    parser.add_argument(
        "--strategies",
        nargs="*",
        metavar="NAME",
        help="only these, or without a name baselines alone; default: all",
    )
    parser.add_argument("--accelerator", metavar="NAME", help="a registered name; default: what DeepSpeed chooses")
    parser.add_argument("--config", metavar="FILE", help="a YAML file with strategies' sections; default: $H2D_CONFIG")
    parser.add_argument("--threads", type=count, metavar="N", help="host threads of each rank")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, with every raw measurement")


def choices(parser: argparse.ArgumentParser, options: argparse.Namespace, *, also: Collection[str] = ()) -> list[str]:
    """The strategies to measure. Ends the program with status 2 where a name or the configuration is wrong.

    Args:
        parser: Tells what is wrong.
        options: Those of the command line.
        also: Names that stand for no strategy and are right all the same.
    """
    from accelerators import AcceleratorError
    from accelerators.registry import available_accelerators, explain_unknown

    from ...config_file import resolve_config
    from ...errors import ConfigError, UnknownStrategyError
    from ...registry import get_strategy, strategy_names

    if options.accelerator is not None and options.accelerator not in available_accelerators():
        parser.error(f"argument --accelerator: {explain_unknown(options.accelerator)}")
    try:
        config = resolve_config(options.config)
        if options.accelerator is None:
            options.accelerator = config.accelerator
        for name in options.strategies or ():
            if name not in also:
                get_strategy(name)
    except UnknownStrategyError as error:
        parser.error(f"argument --strategies: {error}")
    except (ConfigError, AcceleratorError) as error:
        parser.error(str(error))
    chosen = strategy_names() if options.strategies is None else options.strategies
    return list(dict.fromkeys(chosen))


def run_worker(worker: str, given: Mapping[str, Any], options: argparse.Namespace, **how: bool) -> Any | None:
    """What the worker returned, or None after its failure has been told on the standard error.

    Args:
        worker: As for ``launch``.
        given: Handed to the worker.
        options: Those of the command line; ``ranks`` and ``threads`` are used here.
        **how: More arguments of ``launch``.
    """
    from accelerators import AcceleratorError

    from ...errors import TransferError

    try:
        # DeepSpeed logs to the standard output, which is for the result.
        with contextlib.redirect_stdout(sys.stderr):
            return launch(worker, given, options.ranks, threads=options.threads, **how)
    except (TransferError, AcceleratorError, RanksFailedError) as error:
        print(f"h2d bench: {error}", file=sys.stderr)
        return None
