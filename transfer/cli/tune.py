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

from ..errors import TransferError
from ..machine_profile import MachineProfile
from .ranks import RanksFailedError, launch

#: Bounds the memory of a rank to 2 GiB.
_LARGEST_CHUNK = 2**27


def main(arguments: Sequence[str]) -> int:
    """Measures, writes the profile and tells what follows from it.

    Returns:
        The exit status: 0 also where there is nothing to tune, 1 where it failed.
    """
    options = _parser().parse_args(list(arguments))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed tells what it has chosen
            accelerator = get_accelerator(options.accelerator)
            reason = accelerator.unavailable_reason()
        if reason is not None:
            return _failed(f"{accelerator.name} cannot be measured. {reason}")
        obstacle = accelerator.capabilities.why_not("pins_host_memory", "events")
        if obstacle is not None:
            return _nothing_to_tune(accelerator.name, obstacle, options.json)
        fields = launch(
            "transfer.cli.tune_worker:run", _worker_options(options), options.ranks, threads=options.threads
        )
        profile = MachineProfile.model_validate(fields)
        file = profile.save(options.output)
    except (AcceleratorError, TransferError, RanksFailedError) as error:
        return _failed(str(error))
    _tell(profile, file, options.json)
    return 0


def _tell(profile: MachineProfile, file: str, as_json: bool) -> None:
    from .tune_report import best_rings, choices, print_report

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
    return {"accelerator": options.accelerator, "rounds": 3 if options.quick else 5, "largest_chunk": largest}


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
    add("--ranks", type=_at_least(1), default=1, help="processes that measure at once, as the job has on a host")
    add("--threads", type=_at_least(1), help="host threads of each, as the job has (default: torch's own)")
    add("--accelerator", help="a registered name (default: what get_accelerator() returns)")
    add("--output", type=Path, help="the file to write (default: $H2D_PROFILE, or else one in ~/.cache)")
    add("--quick", action="store_true", help="smaller sizes and fewer rounds, in a few seconds")
    largest = _at_least(1024, _LARGEST_CHUNK)
    add("--largest-chunk", type=largest, metavar="ELEMENTS", help="of the sizes tried (default: 67108864)")
    add("--json", action="store_true", help="print the profile and what follows from it as JSON")
    return parser


def _at_least(smallest: int, largest: int | None = None) -> Any:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest or (largest is not None and int(text) > largest):
            upper = "" if largest is None else f" and at most {largest}"
            raise argparse.ArgumentTypeError(f"expected a whole number, at least {smallest}{upper}, not {text!r}")
        return int(text)

    return whole
