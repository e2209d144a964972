"""`h2d tune`: measures this machine in under a minute and writes the profile for `strategy: measured`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerators import AcceleratorError, get_accelerator
from accelerators.registry import available_accelerators, explain_unknown

from ...errors import TransferError
from ...measured.profile import MachineProfile
from ..measuring.quantities import count
from ..measuring.ranks import RanksFailedError, launch

#: Bounds the memory of a rank to 2 GiB.
_LARGEST_CHUNK = 2**27
_SMALLEST_CHUNK = 2**10


def main(arguments: Sequence[str]) -> int:
    """Measures, writes the profile and tells what follows from it.

    Returns:
        The exit status: 0 also where there is nothing to tune, 1 where it failed, 2 where an argument is wrong.
    """
    parser = _parser()
    options = parser.parse_args(list(arguments))
    if options.accelerator is not None and options.accelerator not in available_accelerators():
        parser.error(f"argument --accelerator: {explain_unknown(options.accelerator)}")
    if options.output is not None and not options.output.resolve().parent.is_dir():
        parser.error(f"argument --output: there is no directory {options.output.parent}")
    if options.largest_chunk is not None and not _SMALLEST_CHUNK <= options.largest_chunk <= _LARGEST_CHUNK:
        parser.error(f"argument --largest-chunk: expected from {_SMALLEST_CHUNK} to {_LARGEST_CHUNK}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed tells what it has chosen
            accelerator = get_accelerator(options.accelerator)
            reason = accelerator.unavailable_reason()
        if reason is not None:
            return _failed(f"{accelerator.name} cannot be measured. {reason}")
        obstacle = accelerator.capabilities.why_not("pins_host_memory", "events")
        if obstacle is not None:
            not_measured = " The drive was not measured either." if options.nvme is not None else ""
            return _nothing_to_tune(accelerator.name, obstacle + not_measured, options.json)
        fields = launch(
            "transfer.cli.tune.worker:run", _worker_options(options), options.ranks, threads=options.threads
        )
        profile = MachineProfile.model_validate(fields)
        file = profile.save(options.output)
    except (AcceleratorError, TransferError, RanksFailedError) as error:
        return _failed(str(error))
    _tell(profile, file, options.json)
    return 0


def _tell(profile: MachineProfile, file: str, as_json: bool) -> None:
    from .report import best_rings, choices, print_report

    if as_json:
        rings = {name: ring._asdict() for name, ring in best_rings(profile).items()}
        result = {"file": file, "profile": profile.model_dump(), "best_rings": rings, "choices": choices(profile)}
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    console = Console()
    print_report(console, profile)
    console.print(f"\nWritten to {file}", highlight=False, soft_wrap=True)


def _worker_options(options: argparse.Namespace) -> dict[str, Any]:
    largest = options.largest_chunk or (2**24 if options.quick else 2**26)
    return {
        "accelerator": options.accelerator,
        "rounds": 3 if options.quick else 5,
        "largest_chunk": largest,
        "nvme": options.nvme,
        "drive_bounds": {"file_bytes": 2**27, "cell_seconds": 0.05} if options.quick else {},
    }


def _nothing_to_tune(name: str, obstacle: str, as_json: bool) -> int:
    message = f"Nothing to tune on {name}: every copy is `pageable`. {obstacle}"
    print(json.dumps({"file": None, "nothing_to_tune": message}) if as_json else message)
    return 0


def _failed(message: str) -> int:
    print(f"h2d tune: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="h2d tune", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=count, default=1, metavar="N", help="processes that measure at once, as the job has on a host")
    add("--threads", type=count, metavar="N", help="host threads of each, as the job has (default: torch's own)")
    add("--accelerator", help="a registered name (default: what get_accelerator() returns)")
    add("--output", type=Path, help="the file to write (default: $H2D_PROFILE, or else one in ~/.cache)")
    add("--quick", action="store_true", help="smaller sizes and fewer rounds, in a few seconds")
    add("--largest-chunk", type=count, metavar="ELEMENTS", help="of the sizes tried (default 2^26)")
    add(
        "--nvme",
        metavar="DIR",
        help="also measure the drive of this directory with a file of 512 MiB for each rank, which is deleted again: "
        "block sizes and threads, for `nvme_swapped`",
    )
    add("--json", action="store_true", help="print the profile and what follows from it as JSON")
    return parser
