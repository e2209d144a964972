"""``h2d plan``: seconds and memory of a job, for DeepSpeed as it is, with this package, and for others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..arguments import Parser
from ..measuring.options import tell
from ..measuring.quantities import count, positive
from . import checks
from .machine import DEVICES, Machine, machine, of_profile
from .model import Job, predict

SCHEMA_VERSION = 1
_DEVICE = "h200"

DESCRIPTION = """\
What would I gain? Computes seconds and memory of one iteration of a job under
ZeRO-3 with its optimizer on the host: for DeepSpeed as it is, for each strategy
of this package, for DeepSpeed with `offload_param: cpu`, and for torch's FSDP2
with CPU offload. Nothing is run, and no accelerator is needed.

  h2d plan 32e9 --ranks 8                one node of 8 devices
  h2d plan 32e9 --ranks 8 --nodes 1 2 4  the same job on 1, 2 and 4 nodes
  h2d plan 8e9 --ranks 2 --drive 6       the optimizer's state in files
  h2d plan 8e9 --device a100             another device

Rates are what you give; else what `h2d tune` has measured on this machine, if
it has; else typical values. Each is printed with where it comes from. The last
table says how far the model was from runs that it was not made from.
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the plan; returns the exit status."""
    options = vars(parsed := make_parser().parse_args(arguments))
    profile = None
    if options["device"] is None:
        profile = None if parsed.typical else _profile(parsed)
        options["device"] = _device_of(profile) or _DEVICE
    plans = [_plan(options, nodes, profile) for nodes in dict.fromkeys(options["nodes"])]
    from .report import show

    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "plan",
        "profile": None if profile is None else {key: profile[key] for key in ("ranks", "threads", "device")},
        "plans": plans,
        "checks": checks.as_data(),
        "gains": [
            {"source": source, "quantity": quantity, "measured_times": measured, "predicted_times": predicted}
            for source, quantity, measured, predicted in checks.gains()
        ],
    }
    tell(report, parsed, show)
    return 0


def _plan(options: dict[str, Any], nodes: int, profile: dict[str, Any] | None) -> dict[str, Any]:
    job = Job(
        parameters=options["parameters"],
        ranks=options["ranks"],
        nodes=nodes,
        ratio=options["ratio"],
        sub_group_elements=options["sub_group_size"],
        tokens=options["tokens"],
        layers=options["layers"],
    )
    found: Machine = machine(options, nodes, profile)
    return {
        "job": checks.job_data(job),
        "threads": options["threads"],
        "rates": vars(found.rates),
        "sources": dict(found.sources),
        "ways": [vars(way) for way in predict(job, found.rates).values()],
    }


def _profile(options: argparse.Namespace) -> dict[str, Any] | None:
    """The rates of this machine's profile, or None where there is none.

    Raises:
        ConfigError: The profile cannot be read.
    """
    from ...measured.place import may_exist

    if options.profile is None and not may_exist():
        return None
    from ...measured.profile import MachineProfile

    profile = MachineProfile.load(options.profile)
    return None if profile is None else of_profile(profile)


def _device_of(profile: dict[str, Any] | None) -> str | None:
    """The key of ``DEVICES`` for a profile's device, or None where it is none of them."""
    words = "" if profile is None else profile["device"].lower().replace(" ", "")
    return next((name for name in DEVICES if name in words), None)


def make_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(
        prog="h2d plan",
        description=DESCRIPTION,
        epilog="Exit status: 0; 1 where the profile cannot be read;\n2 where the arguments are wrong.",
    )
    job, rates = parser.add_argument_group("the job"), parser.add_argument_group("the machine")
    job.add_argument("parameters", type=count, metavar="PARAMETERS", help="of the model, such as 32e9")
    job.add_argument("--ranks", type=count, default=1, metavar="N", help="of each node (default 1)")
    job.add_argument("--nodes", type=count, nargs="+", default=[1], metavar="N", help="one or more numbers (default 1)")
    job.add_argument("--threads", type=count, default=12, metavar="N", help="host threads of each rank (default 12)")
    ratio = "of the optimizer's state that is on the host, as in DeepSpeed's config (default 1)"
    job.add_argument("--ratio", type=_share, default=1.0, metavar="R", help=ratio)
    group = "DeepSpeed's `sub_group_size` (default 1e9)"
    job.add_argument("--sub-group-size", type=count, default=10**9, metavar="N", help=group)
    tokens = "of each rank in one iteration (default 2048)"
    job.add_argument("--tokens", type=count, default=2048, metavar="N", help=tokens)
    job.add_argument("--layers", type=count, metavar="N", help="of the model (default: as models of its size have)")
    device = f"one of {', '.join(DEVICES)}: typical rates of this device, whatever the profile says (default {_DEVICE})"
    rates.add_argument("--device", choices=DEVICES, metavar="NAME", help=device)
    rates.add_argument("--link", type=positive, metavar="GB/S", help="between the host and one device, one way")
    memory = "of a node's host memory, shared by its ranks"
    rates.add_argument("--memory-bandwidth", type=positive, metavar="GB/S", help=memory)
    drive = "of a node's drives, reads and writes together: the optimizer's state is in files then"
    rates.add_argument("--drive", type=positive, metavar="GB/S", help=drive)
    nvme = "the optimizer's state is in files, on the drive of the profile, else on a typical one"
    rates.add_argument("--nvme", action="store_true", help=nvme)
    rates.add_argument("--network", type=positive, metavar="GB/S", help="from one device to the others")
    rates.add_argument("--tflops", type=positive, metavar="N", help="that one device reaches in forward and backward")
    rates.add_argument("--profile", metavar="FILE", help="of `h2d tune`; default: $H2D_PROFILE, or this machine's")
    rates.add_argument("--typical", action="store_true", help="typical values, also where there is a profile")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, not {text!r}")
    return value
