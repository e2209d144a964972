"""How ``h2d doctor`` shows what was found, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..measuring.report import console, plural, say
from .finding import Finding

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "no": ("NO", "bold red"), "unknown": ("?", "dim")}


def show(sections: Sequence[tuple[str, Sequence[Finding]]]) -> None:
    """Prints each section, and the verdict at the end."""
    out = console(width=80)
    for title, found in sections:
        out.print(Text(f"\n{title}", style="bold"))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=4)
        grid.add_column(width=16, overflow="fold")
        grid.add_column(overflow="fold")
        for each in found:
            mark, style = _MARKS[each.status]
            grid.add_row(Text(mark, style=style), Text(each.name), Text(_sentences(each)))
        out.print(Padding(grid, (0, 0, 0, 2)))
    everything = [each for _, found in sections for each in found]
    against = [each.name for each in everything if each.status == "no"]
    notes = sum(each.status == "note" for each in everything)
    better = f" {plural(notes, 'note')} could make it better." if notes else ""
    say(out, "")
    if against:
        say(out, f"Not fit: {', '.join(dict.fromkeys(against))}.{better}")
    else:
        say(out, f"Fit: copy-backs of ZeRO-3 would be served here.{better}")


def _sentences(finding: Finding) -> str:
    lines = [finding.found]
    if finding.wanted is not None:
        lines.append(f"wanted: {finding.wanted}")
    if finding.remedy is not None:
        lines.append(f"to do: {finding.remedy}")
    return "\n".join(lines)
