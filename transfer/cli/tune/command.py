"""`h2d tune`: measures this machine in under a minute and writes the profile for `strategy: measured`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..arguments import Parser
from ..measuring.options import add_common_options, check_accelerator, tell
from ..measuring.quantities import count
from ..measuring.ranks import launch

SCHEMA_VERSION = 1

_HEAD = {"schema_version": SCHEMA_VERSION, "command": "tune"}

_DESCRIPTION = """\
Measures this machine in under a minute: each strategy at a few sizes, an
optimizer's updates, and with --nvme a drive. Writes the profile that
`strategy: measured` chooses by, and prints a configuration.
"""

_EPILOG = """\
examples:
  h2d tune --ranks 8 --threads 12      as your job runs
  h2d tune --nvme /local_nvme          the drive too
  h2d tune --quick                     a few seconds, to see how it looks

Exit status: 0, also where there is nothing to tune; 1 if it failed; 2 if an
argument is wrong; 130 after Ctrl-C.
"""

_ELEMENTS = (2**18, 2**20, 2**22, 2**24, 2**26)


def main(arguments: Sequence[str]) -> int:
    """Measures, writes the profile and tells what follows from it.

    Returns:
        The exit status: 0 also where there is nothing to tune, 1 where it failed, 2 where an argument is wrong.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    from ...measured.profile import MachineProfile
    from .report import best_settings, choices, show

    check_accelerator(parser, options)
    if options.output is not None and not Path(options.output).resolve().parent.is_dir():
        parser.error(f"argument --output: there is no directory {Path(options.output).parent}")
    nothing = _nothing_to_tune(options)
    if nothing is not None:
        tell({**_HEAD, "file": None, "nothing_to_tune": nothing}, options, lambda _report: print(nothing))
        return 0
    options.elements = sorted(set(options.elements or (_ELEMENTS[:3] if options.quick else _ELEMENTS)))
    measured = launch("transfer.cli.tune.worker:run", vars(options), options.ranks, threads=options.threads)
    profile = MachineProfile.model_validate(measured)
    file = profile.save(options.output)
    report = {**_HEAD, "file": file, "profile": measured, "best": best_settings(profile), "choices": choices(profile)}
    tell(report, options, lambda _report: show(profile, file, wide=options.wide))
    return 0


def _nothing_to_tune(options: argparse.Namespace) -> str | None:
    """Why every copy is ``pageable`` here, or None.

    Raises:
        AcceleratorFailedError: The accelerator is not available.
    """
    from ...accelerator_choice import AcceleratorChoice

    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed tells what it has chosen
        accelerator = AcceleratorChoice(options.accelerator).resolve()
        obstacle = accelerator.capabilities.why_not("pins_host_memory", "events")
    if obstacle is None:
        return None
    not_measured = " The drive was not measured either." if options.nvme is not None else ""
    return f"Nothing to tune on {accelerator.name}: every copy is `pageable`. {obstacle}{not_measured}"


def make_parser() -> Parser:
    """The command's arguments."""
    made = Parser(prog="h2d tune", description=_DESCRIPTION, epilog=_EPILOG)
    add_common_options(made)
    add = made.add_argument
    add("--output", metavar="FILE", help="what to write (default: $H2D_PROFILE, or else in ~/.cache)")
    add("--quick", action="store_true", help="fewer and smaller sizes and fewer rounds, in a few seconds")
    add("--elements", type=count, nargs="+", metavar="N", help="of the copies (default: 2^18 2^20 2^22 2^24 2^26)")
    add(
        "--nvme",
        metavar="DIR",
        help="also measure the drive of this directory with a file of 512 MiB for each rank, which is deleted again: "
        "request sizes and threads, for `nvme_swapped`",
    )
    return made
