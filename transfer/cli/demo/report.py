"""How ``h2d demo`` shows its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from ..measuring.table import console, hardware_line, make_table

_COLUMNS = ("run", "first\nloss", "last\nloss", "seconds\na step", "copies", "elements\nthat differ")


def show(report: Mapping[str, Any]) -> None:
    """Prints the table and what it says in plain words."""
    out = console()
    ours, alone = report["runs"]
    differing, elements = report["elements_that_differ"], report["elements"]
    out.print(Text(hardware_line(report["hardware"], report["ranks"])))
    found = Text(f"{differing:,}", style="green" if differing == 0 else "bold red")
    out.print(make_table("", _COLUMNS, [[_row(ours, f"{ours['copies']:,}", found), _row(alone, "-", "-")]]))
    out.print(Text(_verdict(ours, differing, elements)))
    if report["accelerator"] == "simulated":
        out.print(Text("The accelerator is simulated, so the times say nothing about a real one."))


def _row(run: Mapping[str, Any], copies: str, differing: str | Text) -> tuple[str | Text, ...]:
    losses = run["losses"]
    return (
        run["name"],
        f"{losses[0]:.3f}",
        f"{losses[-1]:.3f}",
        f"{run['median_step_seconds']:.3f}",
        copies,
        differing,
    )


def _verdict(ours: Mapping[str, Any], differing: int, elements: int) -> str:
    if ours["copies"] == 0:
        return (
            "No copy went through this package: with this accelerator or this configuration there is nothing to copy "
            "from the host to a device. Nothing was shown."
        )
    how = f"{ours['copied_bytes'] / 2**20:,.0f} MiB went through {', '.join(ours['strategies'])}."
    if differing:
        return f"WRONG: {differing:,} of {elements:,} elements differ from DeepSpeed alone. {how} Please report this."
    return f"All {elements:,} elements are the same, bit for bit, as under DeepSpeed alone. {how}"
