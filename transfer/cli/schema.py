"""``h2d schema``: a JSON schema of the configuration, for editors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser

_DESCRIPTION = """\
Prints a JSON schema of the YAML configuration: every key with its bounds and
what it does, with a section for each strategy, also for those of plug-ins.
Editors complete and check with it.
"""

_EPILOG = """\
examples:
  h2d schema --output h2d.schema.json

Then write as the first line of the YAML file, for VS Code (with the YAML
extension) and other editors with yaml-language-server:
  # yaml-language-server: $schema=h2d.schema.json

Exit status: 0; 1 if the file cannot be written; 2 if an argument is wrong.
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the schema, or writes it."""
    options = make_parser().parse_args(arguments)
    from ..config import TransferConfig
    from ..config_file import ROOT
    from ..errors import ConfigFileError, ConfigProblem
    from ..schema.json_schema import json_schema

    text = json.dumps(json_schema(TransferConfig, TransferConfig.sections(), ROOT), indent=2)
    if options.output is None:
        print(text)
        return 0
    try:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        problem = ConfigProblem("", f"cannot be written: {error.strerror}", options.output)
        raise ConfigFileError([problem]) from error
    return 0


def make_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog="h2d schema", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--output", metavar="FILE", help="write it there (default: print it)")
    return parser
