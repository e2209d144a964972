"""``h2d explain``: what the policy would choose for each sub-group, why, and what would change it."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import Parser
from ..measuring.quantities import count, dtype_name
from ..quiet import looking

SCHEMA_VERSION = 1

_ELEMENTS = (2**16, 2**20, 2**24, 2**28)
#: DeepSpeed's default of `zero_optimization.sub_group_size`.
_SUB_GROUP = 10**9

_DESCRIPTION = """\
What would be chosen for the copy-back of each sub-group, why, and what would
change it. Asks the policy itself; copies nothing, and allocates nothing of a
sub-group's size.
"""

_EPILOG = """\
examples:
  h2d explain transfer.yaml
  h2d explain ds_config.json --elements 1e9 250e6
  h2d explain --accelerator simulated     the defaults, on any machine

Exit status: 0; 1 if the configuration has mistakes or cannot be read, or the
accelerator is not here; 2 if an argument is wrong.
"""


def main(arguments: Sequence[str]) -> int:
    """Asks for each size, and tells."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    from accelerators import get_accelerator
    from accelerators.registry import available_accelerators, explain_unknown

    if options.accelerator is not None and options.accelerator not in available_accelerators():
        parser.error(f"argument --accelerator: {explain_unknown(options.accelerator)}")
    with looking():
        import torch

        from ...accelerator_choice import AcceleratorChoice
        from ...config_file import resolve_config
        from ..configurations import check
        from .choices import Asker, budget

        checked = check(options.file) if options.file is not None else None
        config = resolve_config(None) if checked is None else checked.config
        wanted = options.accelerator or (config.accelerator if config is not None else None)
        accelerator = AcceleratorChoice(wanted).resolve()
    if config is None:
        for problem in checked.problems if checked is not None else ():
            print(problem, file=sys.stderr)
        return 1
    if options.accelerator is None and accelerator.name == "cpu":
        print("There is no accelerator here: the simulated one stands for it.", file=sys.stderr)
        accelerator = get_accelerator("simulated")
    sizes = options.elements or _sizes(checked.deepspeed if checked is not None else {})
    asker = Asker(config, accelerator, getattr(torch, options.dtype))
    with warnings.catch_warnings(record=True) as warned:  # that there is no profile: told once, below
        warnings.simplefilter("always")
        explained = [asker.explain(elements) for elements in sizes]
    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "explain",
        "accelerator": accelerator.name,
        "source_dtype": "float32",
        "dtype": options.dtype,
        "completion": config.completion,
        "sub_groups": explained,
        "page_locks": budget(list(explained), config),
        "notes": list(checked.notes) if checked is not None else [],
        "warnings": list(dict.fromkeys(str(one.message) for one in warned)) if config.strategy == "measured" else [],
    }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        from .report import show

        show(report)
    return 0


def _sizes(deepspeed: Mapping[str, Any]) -> list[int]:
    zero = deepspeed.get("zero_optimization")
    size = zero.get("sub_group_size", _SUB_GROUP) if isinstance(zero, Mapping) else _SUB_GROUP
    with contextlib.suppress(TypeError, ValueError):  # "auto"
        return [*_ELEMENTS, int(float(size))]
    return [*_ELEMENTS, _SUB_GROUP]


def make_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog="h2d explain", description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="YAML, or a DeepSpeed config (.json); default: $H2D_CONFIG")
    sizes = "of sub-groups (default: 2^16 2^20 2^24 2^28, and DeepSpeed's sub_group_size)"
    add("--elements", type=count, nargs="+", metavar="N", help=sizes)
    add("--dtype", type=dtype_name, default="bfloat16", help="of the parameters on the device (default: bfloat16)")
    add("--accelerator", metavar="NAME", help="a registered name; default: the configured one, or DeepSpeed's choice")
    add("--json", action="store_true", help="print the result as JSON")
    return parser
