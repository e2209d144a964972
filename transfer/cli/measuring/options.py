"""What the measuring commands take from the command line, and how they start their worker."""

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
    parser.set_defaults(command=" ".join(parser.prog.split()[:2]))
    add = parser.add_argument
    add("--ranks", type=count, default=1, metavar="N", help="processes at the same time (default 1)")
    add("--accelerator", metavar="NAME", help="a registered name; default: what DeepSpeed chooses")
    add("--config", metavar="FILE", help="a YAML file with strategies' sections; default: $H2D_CONFIG")
    add("--threads", type=count, metavar="N", help="host threads of each rank")
    add("--json", action="store_true", help="print the result as JSON, with every raw measurement")


def add_strategies_option(parser: argparse.ArgumentParser) -> None:
    """Adds what ``choices`` reads."""
    parser.add_argument(
        "--strategies",
        nargs="*",
        metavar="NAME",
        help="only these, or without a name baselines alone; default: all",
    )


def check_accelerator(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Sets ``options.accelerator`` from the configuration if need be. Ends the program with status 2 where it is wrong.

    Args:
        parser: Tells what is wrong.
        options: Those of the command line.
    """
    from accelerators import AcceleratorError
    from accelerators.registry import available_accelerators, explain_unknown

    from ...config_file import resolve_config
    from ...errors import ConfigError

    try:
        if options.accelerator is not None and options.accelerator not in available_accelerators():
            parser.error(f"argument --accelerator: {explain_unknown(options.accelerator)}")
        config = resolve_config(options.config)
    except (ConfigError, AcceleratorError) as error:
        parser.error(str(error))
    if options.accelerator is None:
        options.accelerator = config.accelerator


def choices(parser: argparse.ArgumentParser, options: argparse.Namespace, *, also: Collection[str] = ()) -> list[str]:
    """The strategies to measure. Ends the program with status 2 where a name or the configuration is wrong.

    Args:
        parser: Tells what is wrong.
        options: Those of the command line.
        also: Names that stand for no strategy and are right all the same.
    """
    from ...errors import UnknownStrategyError
    from ...registry import get_strategy, strategy_names

    check_accelerator(parser, options)
    try:
        for name in set(options.strategies or ()) - set(also):
            get_strategy(name)
    except UnknownStrategyError as error:
        parser.error(f"argument --strategies: {error}")
    return list(dict.fromkeys(strategy_names() if options.strategies is None else options.strategies))


def run_worker(worker: str, given: Mapping[str, Any], options: argparse.Namespace, **how: bool) -> Any | None:
    """What the worker returned, or None after a failure, which is printed on the standard error.

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
        fail(options, error)
        return None


def fail(options: argparse.Namespace, error: object) -> int:
    """Prints what went wrong on the standard error; returns the exit status."""
    print(f"{options.command}: {error}", file=sys.stderr)
    return 1
