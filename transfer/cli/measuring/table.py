"""Tables on the standard output, and how figures are written in them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Wide enough for every table here; where the output is no terminal nobody says how wide it is.
_UNKNOWN_WIDTH = 180


def console() -> Console:
    """Writes to the standard output of the moment."""
    out = Console(file=sys.stdout, highlight=False)
    return out if out.is_terminal else Console(file=sys.stdout, highlight=False, width=_UNKNOWN_WIDTH)


def make_table(title: str, columns: Sequence[str], groups: Iterable[Sequence[Sequence[str | Text]]]) -> Table:
    """A table whose first column is a name and whose others are figures; a line under each group of rows."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for rows in groups:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def number(value: float | None, form: str, unit: str = "") -> str:
    """A figure, or a dash where it was not measured."""
    return "-" if value is None else f"{value:{form}}{unit}"


def mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.1f}" if value else "0"


def verdict(right_bits: bool | None) -> Text:
    """Of the comparison with ``source.to(dtype)``; None: there is nothing to compare."""
    if right_bits is None:
        return Text("-")
    return Text("equal", style="green") if right_bits else Text("WRONG", style="bold red")


def hardware_line(hardware: Mapping[str, Any], ranks: int) -> str:
    device = hardware["device"] or hardware["accelerator"]
    return (
        f"{device}; {hardware['cpu']}, {hardware['cores']} cores; {ranks} rank{'s' * (ranks > 1)} with "
        f"{hardware['threads']} host thread{'s' * (hardware['threads'] > 1)}; torch {hardware['torch']}, "
        f"DeepSpeed {hardware['deepspeed']}; {hardware['date']}"
    )


def legend(summaries: Iterable[tuple[str, str]]) -> Table:
    """Names and what they stand for."""
    grid = Table.grid(padding=(0, 2))
    for name, summary in summaries:
        grid.add_row(Text(name), Text(summary))
    return grid
