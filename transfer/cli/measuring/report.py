"""Reports as data: figures from raw seconds, and tables, which are a title and columns.

Ratios are taken round by round, so that a drifting machine cancels out.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ...nvme.mounts import MEMORY_FILE_SYSTEMS
from .quantities import format_count

#: Of lines; where the output is no terminal, its width is unknown. Tables fit into 80.
_UNKNOWN_WIDTH = 180
#: In a narrower terminal lines are broken by it; in tables, names would be cut.
_NARROWEST = 80
#: Of `--wide`.
WIDE = 240


def slowest(seconds_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each round, the time of the rank that took longest: until then the others wait for it."""
    return [max(values) for values in zip(*seconds_by_rank, strict=True)]


def spread_percent(seconds: Sequence[float]) -> float:
    """The interquartile range as a percentage of the median; 0 for a single measurement."""
    if len(seconds) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return 100 * (upper - lower) / middle


def median_ratio(numerators: Sequence[float] | None, denominators: Sequence[float]) -> float | None:
    """The median of the rounds' ratios; None where the numerators were not measured."""
    if numerators is None:
        return None
    return statistics.median(above / below for above, below in zip(numerators, denominators, strict=True))


def number(form: str, unit: str = "", scale: float = 1) -> Callable[[float | None], str]:
    """Writes a figure; a dash where it was not measured."""
    return lambda value: "-" if value is None else f"{value * scale:{form}}{unit}"


times = number(".2f", "x")
percent = number(".0%")


def mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.1f}" if value else "0"


def verdict(right_bits: bool | None) -> Text:
    """Of the comparison with ``source.to(dtype)``; None: there is nothing to compare."""
    if right_bits is None:
        return Text("-")
    return Text("equal", style="green") if right_bits else Text("WRONG", style="bold red")


class Column(NamedTuple):
    """One column of a table, and one figure of the JSON where it has to be computed."""

    title: str
    key: str  #: Of the measurement, or of its ``figures``.
    show: Callable[[Any], str | Text] = str  #: Makes text of the value.
    figure: Callable[[Any], Any] | None = None  #: Computes the value from a row, where the measurement has it not.


def figures(columns: Iterable[Column], row: Any) -> dict[str, Any]:
    """The figures of one row, by the keys of their columns."""
    return {column.key: column.figure(row) for column in columns if column.figure is not None}


def make_table(title: str, columns: Sequence[Column], groups: Iterable[Sequence[Mapping[str, Any]]]) -> Group:
    """A table of measurements whose first column is a name, shown whole; a line under each group of rows."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column.title, justify="right" if index else "left", no_wrap=not index)
    for rows in groups:
        for row in rows:
            found = {**row, **row.get("figures", {})}
            table.add_row(*(column.show(found.get(column.key)) for column in columns))
        table.add_section()
    return Group("", Text(title, style="italic"), table)


def console(width: int | None = None, at_least: int = _NARROWEST) -> Console:
    """Writes to the standard output of the moment.

    Args:
        width: Of lines, where the output is no terminal; None for the default.
        at_least: Of lines in a terminal, which breaks them where it is narrower.
    """
    out = Console(file=sys.stdout, highlight=False)
    if out.is_terminal and out.width >= at_least:
        return out
    return Console(file=sys.stdout, highlight=False, width=at_least if out.is_terminal else width or _UNKNOWN_WIDTH)


def say(out: Console, sentence: str) -> None:
    """Prints a sentence as it is: nothing in it is markup."""
    out.print(Text(sentence))


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def one_table(*tables: Sequence[Column]) -> list[Column]:
    """The columns of several tables of the same rows, each once."""
    return list({column.key: column for table in tables for column in table}.values())


def reasons(not_run: Iterable[Mapping[str, Any]], cases: int) -> Iterator[str]:
    """Why variants could not run, each reason once, with the sizes that it is for unless it is for all ``cases``."""
    sizes: dict[tuple[str, str], list[int | None]] = {}
    for entry in not_run:
        sizes.setdefault((entry["variant"], entry["reason"]), []).append(entry.get("elements"))
    for (variant, reason), of in sizes.items():
        some = [format_count(size) for size in dict.fromkeys(of) if size is not None] if len(of) < cases else []
        yield f"not run: {variant}: {reason}" + (f" ({', '.join(some)} elements)" if some else "")


def say_first(out: Console, accelerator: str) -> None:
    """Says before any figure that there is no device, if so."""
    if accelerator == "simulated":
        out.print(Text("The accelerator is simulated: this tests bits, not speed.", style="bold yellow"))
    elif accelerator == "cpu":
        what = "There is no accelerator here: copies stay in host memory, and no figure is of a device."
        out.print(Text(what, style="bold yellow"))


def hardware_line(hardware: Mapping[str, Any], ranks: int) -> str:
    device = hardware["device"] or hardware["accelerator"]
    return (
        f"{device}; {hardware['cpu']}, {hardware['cores']} cores; {plural(ranks, 'rank')} with "
        f"{plural(hardware['threads'], 'host thread')}; torch {hardware['torch']}, "
        f"DeepSpeed {hardware['deepspeed']}; {hardware['date']}"
    )


def file_system_name(kind: str | None) -> str:
    """What files are on, and a warning where that is no drive."""
    return f"{kind or 'an unknown file system'}{' (which is memory: no drive)' if kind in MEMORY_FILE_SYSTEMS else ''}"


def legend(summaries: Mapping[str, str]) -> Table:
    """Names and what they stand for."""
    grid = Table.grid(padding=(0, 2))
    for name, summary in summaries.items():
        grid.add_row(Text(name), Text(summary))
    return grid
