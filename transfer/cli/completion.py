"""``h2d completion``: the script that completes the command in a shell, made by ``shtab`` from the parsers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from . import COMMANDS
from .arguments import Parser

#: Shell -> what a user adds to which file.
SHELLS = {
    "bash": 'eval "$(h2d completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(h2d completion zsh)"      in ~/.zshrc, after compinit',
    "fish": "h2d completion fish | source       in ~/.config/fish/config.fish",
    "tcsh": "h2d completion tcsh > ~/.h2d.tcsh; source it in ~/.tcshrc",
}

_DESCRIPTION = """\
Prints a script that lets your shell complete commands, options, accelerators
and files. Where it goes:

  {shells}
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the script."""
    options = make_parser().parse_args(arguments)
    shell = options.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        make_parser().error(f"which shell? There is {', '.join(SHELLS)}")
    import shtab

    print(shtab.complete(whole_parser(), shell))
    return 0


def make_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(prog="h2d completion", description=_DESCRIPTION.format(shells="\n  ".join(SHELLS.values())))
    parser.add_argument("shell", nargs="?", choices=list(SHELLS), help="default: that of $SHELL")
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Every command in one parser; imports all of them, and no torch."""
    import shtab

    from accelerators import available_accelerators

    whole = argparse.ArgumentParser(prog="h2d")
    whole.add_argument("--version", action="store_true", help="which version this is")
    commands = whole.add_subparsers()
    for name, (module, summary) in COMMANDS.items():
        parser = import_module(module).make_parser()
        commands.add_parser(name, parents=[parser], add_help=False, help=summary)
        if name == "bench":
            _add_zero3(commands.choices[name])
    for action in _actions(whole):
        if action.metavar in ("FILE", "DIR"):
            action.complete = shtab.FILE if action.metavar == "FILE" else shtab.DIRECTORY  # type: ignore[attr-defined]
        elif "--accelerator" in action.option_strings:
            action.choices = available_accelerators()
        elif action.dest == "script":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return whole


def _add_zero3(bench: argparse.ArgumentParser) -> None:
    from .bench_zero3.command import make_parser as make_zero3

    bench.add_subparsers().add_parser("zero3", parents=[make_zero3()], add_help=False, help="whole optimizer steps")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from _actions(each)
