"""``h2d demo``: is everything installed, does it run here, and are the bits the same?"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import Parser
from ..measuring.options import add_common_options, check_accelerator, tell
from ..measuring.quantities import count
from ..measuring.ranks import launch

SCHEMA_VERSION = 1
_SIMULATED = "simulated"

_DESCRIPTION = """\
Trains a small language model twice under DeepSpeed ZeRO-3 with the optimizer
on the host: first with this package, then under DeepSpeed alone. Both runs
start from the same weights and read the same text, Python's own reference
manual. The weights must agree in every bit at the end.

Without an accelerator the demo takes the simulated one: host memory that poses
as a device, where copies happen as late as the program allows. A missing wait
shows up there as wrong values. Its times say nothing about a real device.
"""

_EPILOG = """\
examples:
  h2d demo                         what most people want
  h2d demo --accelerator simulated without the GPUs of this machine
  h2d demo --config transfer.yaml  with strategies of your own choice
  h2d demo --json > demo.json      with every loss and the seconds of every step

next: add `zero3.attach(engine)` to your script, or start it by `h2d run`.

Exit status: 0 if no element differs; 1 if one does, if no copy went through
this package, or if a rank failed; 2 if an argument is wrong; 130 after Ctrl-C.
"""


def main(arguments: Sequence[str]) -> int:
    """Trains twice, prints the comparison and returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    options.accelerator = _accelerator(parser, options)
    ranks = options.ranks or (2 if options.accelerator == _SIMULATED else min(2, _devices()))
    reason = None if options.optimizer == "adamw" else _compile_cpu_adam()
    if reason is not None:
        if options.optimizer == "cpu_adam":
            _say(f"h2d demo: {reason}")
            return 1
        options.optimizer = "adamw"
        _say(f"{reason} torch's AdamW updates the weights instead of DeepSpeed's CPU Adam.")
    elif options.optimizer == "auto":
        options.optimizer = "cpu_adam"
    _say(f"Training {options.steps} steps twice on {ranks} rank{'s' * (ranks > 1)}: under a minute on most machines.")
    worker = "transfer.cli.demo.worker:train_twice"
    result = launch(worker, vars(options), ranks, threads=options.threads, deepspeed=True)
    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "demo",
        "ranks": ranks,
        **{name: getattr(options, name) for name in ("accelerator", "config", "steps", "optimizer")},
        "optimizer_reason": reason,
        **result,
    }
    from .report import show

    tell(report, options, show)
    return 0 if agrees(report) else 1


def agrees(report: Mapping[str, Any]) -> bool:
    """Whether this package made copies and every element of the weights is the same as without it."""
    ours, _ = report["runs"]
    return bool(ours["copies"] > 0 and report["elements_that_differ"] == 0)


def _accelerator(parser: Parser, options: argparse.Namespace) -> str:
    """The accelerator's name. Ends the program with status 2 where the name or the configuration is wrong."""
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed's warning that there is no GPU: said below
        from accelerators import get_accelerator

        check_accelerator(parser, options)
        chosen = get_accelerator(options.accelerator)
        reason = chosen.unavailable_reason()
    if reason is not None:
        parser.error(f"accelerator {chosen.name}: {reason}")
    name = chosen.name
    if options.accelerator is None and name == "cpu":
        _say("There is no accelerator here: the simulated one takes its place.")
        name = _SIMULATED
    if name == _SIMULATED:
        os.environ["DS_ACCELERATOR"] = "cpu"  # for the ranks: what DeepSpeed computes with is the host
    return name


def _devices() -> int:
    from deepspeed.accelerator import get_accelerator

    return max(1, int(get_accelerator().device_count()))


def _compile_cpu_adam() -> str | None:
    """Why CPU Adam cannot be used, or None. The ranks find it by the environment of this process."""
    from ..measuring import cpu_adam

    os.environ.update(cpu_adam.environment())
    return cpu_adam.compile_once(_say)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def make_parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        prog="h2d demo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_common_options(made, ranks=None, tables=False)
    add = made.add_argument
    add("--steps", type=count, default=20, metavar="N", help="of each run (default 20)")
    add(
        "--optimizer",
        choices=("auto", "cpu_adam", "adamw"),
        default="auto",
        help="cpu_adam: DeepSpeed's, which is compiled once; adamw: torch's own; auto (default): cpu_adam if it can be",
    )
    return made
