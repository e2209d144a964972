"""``h2d run train.py ...``: a program as it is, with every ZeRO-3 engine attached in it and in what it starts."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..schema.environment import ENVIRONMENT_VARIABLE, environment_path
from .arguments import Parser
from .comparing import FILE_VARIABLE, VARIABLE
from .measuring.quantities import count

#: Holds the ``sitecustomize`` that every process below runs when it begins.
BOOTSTRAP = Path(__file__).absolute().with_name("bootstrap")

DESCRIPTION = """\
Becomes the program, with every ZeRO-3 engine attached as by
`transfer.zero3.install()`, in its own process and in every Python process
that it starts: ranks of a launcher, workers of pytest or of a DataLoader.

  h2d run train.py --lr 1e-4                      a script
  h2d run -m pytest -n 2                          a module
  h2d run torchrun --nproc_per_node 2 train.py    a command: torchrun,
                  deepspeed, accelerate launch, bash job.sh, ...

A launcher may also come first:

  torchrun --nproc_per_node 2 -m transfer.cli run train.py
  deepspeed --module transfer.cli run train.py

Rank 0 says on the standard error what is served when an engine is attached,
and at the end. The exit status is the program's.

It works by a folder that comes first on PYTHONPATH. Processes that are given
Python's options -I, -E or -S are not reached. A launcher that starts ranks on
other hosts must pass PYTHONPATH, H2D_RUN and H2D_CONFIG on; for DeepSpeed's,
name the last two in `.deepspeed_env`.

With --compare N, steps of the first ZeRO-3 engine are made by turns: blocks
of up to 4 by DeepSpeed alone, and blocks with this package, until N of each
are counted. The first step after each change is not. Rank 0 then prints
medians, spread, the ratio of neighbouring blocks and whether bits were equal,
and the script goes on with this package. Masters stay in memory of this
package, which may make DeepSpeed's own copies faster. Launchers must pass
H2D_COMPARE on too.

  h2d run --compare 12 train.py --lr 1e-4
"""


def main(arguments: Sequence[str]) -> int:
    """Replaces this process by the program; returns only where that cannot begin, or with ``--print-env``."""
    parser = make_parser()
    launchers = [each for each in arguments[:1] if each.startswith("--local_rank=")]  # which is the script's
    options = parser.parse_args(arguments[len(launchers) :])
    if options.script is None and not options.print_env:
        parser.error("the following arguments are required: script")
    if options.json is not None and options.compare is None:
        parser.error("--json FILE goes with --compare N")
    if os.pathsep in str(BOOTSTRAP):
        parser.error(f"PYTHONPATH cannot name {BOOTSTRAP}, as it has a {os.pathsep!r}")
    program, command = ("", []) if options.print_env else _command(parser, options)
    if options.config or environment_path():
        from ..config_file import resolve_config
        from ..errors import ConfigError

        try:
            resolve_config(options.config)
        except ConfigError as error:
            print(f"h2d run: {error}", file=sys.stderr)
            return 2
    # A process stays the same when it is replaced by the program.
    environment = _environment(options.config, "env" if options.print_env else f"{os.getpid()}-{os.urandom(4).hex()}")
    if options.compare is not None:
        environment[VARIABLE] = str(options.compare)
    if options.json is not None:
        environment[FILE_VARIABLE] = str(Path(options.json).expanduser().absolute())
    if options.print_env:
        for name, value in environment.items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, [*command, *launchers, *options.arguments], {**os.environ, **environment})  # noqa: S606
    except OSError as error:
        print(f"h2d run: {program} cannot be started: {error.strerror}", file=sys.stderr)
    return 126  # as shells say


def make_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog="h2d run", description=DESCRIPTION)
    parser.add_argument("--config", metavar="FILE", help="YAML file; default: $H2D_CONFIG, or each DeepSpeed config")
    parser.add_argument(
        "--print-env",
        action="store_true",
        help='print the exports for programs that are started otherwise: eval "$(h2d run --print-env)"',
    )
    parser.add_argument(
        "--compare", type=count, metavar="N", help="compare N steps with N of DeepSpeed alone, by turns"
    )
    parser.add_argument("--json", metavar="FILE", help="with --compare: write the result to this file too")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", nargs="?", help="the script, module or command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    return parser


def _environment(config: str | None, run: str) -> dict[str, str]:
    """The variables that processes below need. Paths are absolute: they may run elsewhere."""
    before = os.environ.get("PYTHONPATH", "")
    entries = before.split(os.pathsep) if before else []
    outer = os.environ.get("H2D_RUN", "env") if str(BOOTSTRAP) in entries else "env"
    variables = {
        "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *(each for each in entries if each != str(BOOTSTRAP))]),
        "H2D_RUN": run if outer == "env" else outer,  # the outermost command says what was served
    }
    path = config or environment_path()
    if path:
        variables[ENVIRONMENT_VARIABLE] = str(Path(path).expanduser().absolute())
    return variables


def _command(parser: Parser, options: argparse.Namespace) -> tuple[str, list[str]]:
    """The file to execute, and the beginning of its arguments."""
    script: str = options.script
    if options.is_module:
        sys.path.insert(0, str(Path.cwd()))
        if importlib.util.find_spec(script.partition(".")[0]) is None:
            parser.error(f"there is no module {script!r}")
    elif not Path(script).is_file():
        found = shutil.which(script)
        if found is None:
            parser.error(f"there is no script {script!r} here, and no command of this name")
        if Path(found).name.startswith("python") and _ignores_bootstrap(options.arguments):
            parser.error(_IGNORED)
        return found, [script]
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error(_IGNORED)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        flags.append("-u")
    return sys.executable, [sys.executable, *flags, *(["-m"] if options.is_module else []), script]


_IGNORED = "Python's options -I, -E and -S keep this command from reaching the script: leave them out"


def _ignores_bootstrap(arguments: Sequence[str]) -> bool:
    """Whether these arguments of ``python`` have one of those options."""
    flags = itertools.takewhile(lambda each: each.startswith("-"), arguments)
    letters = "".join(re.sub("[cmWX].*", "", each) for each in flags)  # after those four follows their argument
    return bool(set("IES") & set(letters))
