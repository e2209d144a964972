"""The console command ``h2d``. Each sub-command is a module, loaded when it is asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

#: Sub-command -> where its ``main(arguments) -> exit status`` is, and what it does.
COMMANDS = {
    "bench": (
        "transfer.cli.bench_copy.command",
        "measure strategies and baselines; `h2d bench zero3` measures whole steps",
    ),
    "demo": ("transfer.cli.demo.command", "train a small model here and compare every bit with DeepSpeed alone"),
    "run": (
        "transfer.cli.run",
        "run a training script, unchanged, with every ZeRO-3 engine attached, in all its processes",
    ),
    "tune": ("transfer.cli.tune.command", "measure this machine and write the profile that `strategy: measured` uses"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Returns:
        The exit status: 0, 1 where the work failed, 2 where the arguments are wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) > 1 and given[0].startswith("--local_rank=") and given[1] == "run":
        given[:2] = given[1], given[0]  # DeepSpeed's launcher puts its option in front
    if given and given[0] in COMMANDS:
        try:
            status: int = importlib.import_module(COMMANDS[given[0]][0]).main(given[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # as of `h2d bench | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at exit
            return 1
        except KeyboardInterrupt:
            print(f"h2d {given[0]}: interrupted", file=sys.stderr)
            return 130
        except _foreseen(given[0]) as error:
            print(f"h2d {given[0]}: {error}", file=sys.stderr)
            return 1
        return status
    if given and given[0] == "--version":
        print(f"host-to-device-transfer {importlib.metadata.version('host-to-device-transfer')}")
        return 0
    if given and given[0] not in ("-h", "--help"):
        from accelerators.plugin_registry import nearest

        hint = nearest(given[0], list(COMMANDS))
        print(f"h2d: unknown command {given[0]!r}" + (f"; did you mean {hint!r}?" if hint else ""), file=sys.stderr)
    lines = "\n".join(f"  {name:8}{summary}" for name, (_, summary) in COMMANDS.items())
    print(f"usage: h2d COMMAND [options]\n\n{lines}\n\n`h2d COMMAND --help` lists its options.")
    return 0 if not given or given[0] in ("-h", "--help") else 2


def _foreseen(command: str) -> tuple[type[Exception], ...]:
    """What ends a command with one line in place of a traceback. What a training script raises is its own."""
    if command == "run":
        return ()
    from accelerators import AcceleratorError

    from ..errors import TransferError
    from .measuring.ranks import RanksFailedError

    return TransferError, AcceleratorError, RanksFailedError
