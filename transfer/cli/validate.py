"""``h2d validate``: all mistakes of a configuration at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from .arguments import Parser

SCHEMA_VERSION = 1

_DESCRIPTION = """\
Checks configurations: this package's YAML, or a DeepSpeed config in JSON (a
name that ends in .json) with the key `host_to_device_transfer`. Every mistake
is told at once, with its line and with what was probably meant.
"""

_EPILOG = """\
examples:
  h2d validate transfer.yaml
  h2d validate ds_config.json
  h2d validate --json *.yaml > report.json

Exit status: 0; 1 if there is a mistake or a file cannot be read; 2 if an
argument is wrong.
"""


def main(arguments: Sequence[str]) -> int:
    """Checks the files, and tells what is wrong with them."""
    options = make_parser().parse_args(arguments)
    import logging

    from .configurations import check

    logging.getLogger("transfer").addHandler(logging.NullHandler())  # what it would log is told below
    found = {file: check(file) for file in options.files}
    if options.json:
        files = [
            {
                "file": file,
                "kind": one.kind,
                "valid": not one.problems,
                "problems": [asdict(problem) for problem in one.problems],
                "notes": list(one.notes),
            }
            for file, one in found.items()
        ]
        print(json.dumps({"schema_version": SCHEMA_VERSION, "command": "validate", "files": files}, indent=1))
    else:
        for file, one in found.items():
            for problem in one.problems:
                print(problem)
            if not one.problems:
                print(f"{file}: no mistakes ({one.kind})")
            for note in one.notes:
                print(f"  {note}")
    return 1 if any(one.problems for one in found.values()) else 0


def make_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog="h2d validate", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a YAML file, or a DeepSpeed config (.json)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
