"""The console command ``h2d``. Each sub-command is a module, loaded when it is asked for.

A module has ``main(arguments) -> exit status`` and ``make_parser()``. It imports neither torch nor rich before it has
read its arguments: help, mistakes and completion come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: Sub-command -> where its ``main(arguments) -> exit status`` is, and what it does.
COMMANDS = {
    "doctor": ("transfer.cli.doctor.command", "is this machine fit, and would it be served?"),
    "plan": ("transfer.cli.plan.command", "what would this job gain? computed, before anything is run"),
    "trace": ("transfer.cli.trace.command", "what copies cost in a trace of torch's profiler"),
    "demo": ("transfer.cli.demo.command", "train a small model with and without, and compare every bit"),
    "run": ("transfer.cli.run", "run a training script, unchanged, with every engine served"),
    "explain": ("transfer.cli.explain.command", "what is chosen for each sub-group, why, what would change it"),
    "validate": ("transfer.cli.validate", "all mistakes of a configuration at once"),
    "schema": ("transfer.cli.schema", "a JSON schema of the configuration, for editors"),
    "bench": ("transfer.cli.bench_copy.command", "time every way to copy; `h2d bench zero3`: whole steps"),
    "tune": ("transfer.cli.tune.command", "measure this machine, for `strategy: measured`"),
    "completion": ("transfer.cli.completion", "completion for your shell"),
}

#: How the help groups them; one that is in no group stands at the end.
_GROUPS = {
    "Is it for me?": ("doctor", "plan", "trace", "demo"),
    "Use it": ("run", "explain", "validate", "schema"),
    "Measure": ("bench", "tune"),
}

_HELP = """\
usage: h2d COMMAND [options]

Under DeepSpeed ZeRO-3 with an offloaded optimizer, each step copies fp32
master weights from the host back to the device. This makes these copies
fast, with the same bits.

{commands}

First steps:
  h2d doctor                     what is here, and what to do about it
  h2d demo                       a training with and without, in a minute
  h2d run train.py --lr 1e-4     your own script, as it is

`h2d COMMAND --help` explains a command. `h2d --version` says which this is.

Exit status: 0; 1 if the answer is no, or could not be found out; 2 if an
argument is wrong; 130 after Ctrl-C. `h2d run` ends with the script's own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Args:
        arguments: None: those of this process, which then is the command: Ctrl-C in it, wherever it falls, is one line.

    Returns:
        The exit status: 0, 1 where the work failed, 2 where the arguments are wrong.
    """
    if arguments is not None:
        return _run(list(arguments))
    from . import interrupts

    interrupts.watch()
    try:
        return _run(sys.argv[1:])
    finally:
        interrupts.stop_watching()


def _run(given: list[str]) -> int:
    if len(given) > 1 and given[0].startswith("--local_rank=") and given[1] == "run":
        given[:2] = given[1], given[0]  # DeepSpeed's launcher puts its option in front
    name = given[0] if given else "--help"
    try:
        status = _call(name, given[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # as of `h2d bench | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at exit
        return 1
    except KeyboardInterrupt:
        return _interrupted(name)
    except Exception as error:
        if _came():
            return _interrupted(name)
        if not isinstance(error, _foreseen(name)):
            raise
        print(f"h2d {name}: {error}", file=sys.stderr)
        return 1
    return status


def _call(name: str, rest: list[str]) -> int:
    if name in COMMANDS:
        from importlib import import_module

        status: int = import_module(COMMANDS[name][0]).main(rest)
        return status
    if name == "--version":
        from importlib.metadata import version

        print(f"host-to-device-transfer {version('host-to-device-transfer')}")
        return 0
    if name in ("-h", "--help", "help"):
        if rest and rest[0] in COMMANDS:
            return _call(rest[0], ["--help"])
        print(_HELP.format(commands=_commands()))
        return 0
    from .arguments import did_you_mean

    hint = did_you_mean(name, [*COMMANDS, "--help", "--version"])
    kind = "option" if name.startswith("-") else "command"
    print(f"h2d: unknown {kind} {name!r}{hint}\n`h2d --help` lists the commands.", file=sys.stderr)
    return 2


def _commands() -> str:
    """The list of the help."""
    grouped = {name for names in _GROUPS.values() for name in names}
    groups = {**_GROUPS, "And": tuple(name for name in COMMANDS if name not in grouped)}
    blocks = []
    for title, names in groups.items():
        lines = [f"  {name:<12}{COMMANDS[name][1]}" for name in names if name in COMMANDS]
        if lines:
            blocks.append("\n".join([title, *lines]))
    return "\n\n".join(blocks)


def _came() -> bool:
    """Whether an exception is what became of a Ctrl-C."""
    interrupts = sys.modules.get(f"{__name__}.interrupts")
    return interrupts is not None and interrupts.came()


def _interrupted(name: str) -> int:
    print(f"h2d {name}: interrupted" if name in COMMANDS else "h2d: interrupted", file=sys.stderr)
    return 130


def _foreseen(command: str) -> tuple[type[Exception], ...]:
    """What ends a command with one line in place of a traceback. What a training script raises is its own."""
    if command == "run":
        return ()
    from accelerators import AcceleratorError

    from ..errors import TransferError
    from .measuring.ranks import RanksFailedError

    return TransferError, AcceleratorError, RanksFailedError
