"""The parser of every command: one line for a mistake, with what was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

#: How argparse tells of a value that is none of an argument's choices; quoted before Python 3.12.
_INVALID_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """Keeps the lines of a description as they are; a mistake ends the program with status 2 and no usage before it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, with the nearest option where one is not known."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hints = (did_you_mean(each.partition("=")[0], self._names()) for each in unknown if each.startswith("-"))
            self.error(f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, hints), '')}")
        return found

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        choice = _INVALID_CHOICE.search(message)
        if choice is not None:
            message += did_you_mean(choice[1], [each.strip("'") for each in choice[2].split(", ")])
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the options.\n")

    def _names(self) -> Iterable[str]:
        return (name for action in self._actions for name in action.option_strings)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The end of a sentence about an unknown name; empty where no allowed one is near."""
    from accelerators.plugin_registry import nearest

    hint = nearest(name, list(allowed))
    return f"; did you mean {hint!r}?" if hint is not None else ""
