"""What the measuring commands take from the command line, and how they tell what was measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .quantities import count


def add_common_options(
    parser: argparse.ArgumentParser, *, ranks: int | None = 1, strategies: bool = False, tables: bool = True
) -> None:
    """Adds the options that every command has.

    Args:
        parser: The command's.
        ranks: The default of ``--ranks``; None: one for each device.
        strategies: Whether there is ``--strategies``, which ``choices`` reads.
        tables: Whether there is ``--wide``.
    """
    add = parser.add_argument
    default = ranks or "one for each device, at most 2"
    add("--ranks", type=count, default=ranks, metavar="N", help=f"processes at the same time (default: {default})")
    add("--accelerator", metavar="NAME", help="a registered name; default: what DeepSpeed chooses")
    add("--config", metavar="FILE", help="a YAML file with strategies' sections; default: $H2D_CONFIG")
    add("--threads", type=count, metavar="N", help="host threads of each rank")
    add("--json", action="store_true", help="print the result as JSON, with every raw measurement")
    if tables:
        add("--wide", action="store_true", help="all columns in one table, in lines of more than 80 columns")
    if strategies:
        text = "only these, or without a name baselines alone; default: all"
        add("--strategies", nargs="*", metavar="NAME", help=text)


def check_accelerator(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Completes ``options.accelerator`` from the configuration; ends the program with status 2 where it is wrong."""
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
    options.accelerator = options.accelerator or config.accelerator


def choices(parser: argparse.ArgumentParser, options: argparse.Namespace, *, also: Collection[str] = ()) -> list[str]:
    """The strategies to measure; ``also`` are right names of none.

    Ends the program with status 2 where a name or the configuration is wrong.
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


def tell(report: Mapping[str, Any], options: argparse.Namespace, show: Callable[[Mapping[str, Any]], None]) -> None:
    """Prints a report on the standard output: as JSON if that is asked for, else as tables."""
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
