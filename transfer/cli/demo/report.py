"""How ``h2d demo`` shows its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from ..measuring.report import Column, console, hardware_line, make_table, number, say, say_first


def _differing(elements: int | None) -> str | Text:
    if elements is None:
        return "-"
    return Text(f"{elements:,}", style="bold red" if elements else "green")


_COLUMNS = (
    Column("run", "name"),
    Column("first\nloss", "first_loss", number(".3f")),
    Column("last\nloss", "last_loss", number(".3f")),
    Column("seconds\na step", "median_step_seconds", number(".3f")),
    Column("copies", "copies", number(",")),
    Column("elements\nthat differ", "differing", _differing),
)


def show(report: Mapping[str, Any]) -> None:
    """Prints the table and what it says in plain words."""
    out = console()
    ours, alone = report["runs"]
    rows = [{**run, "first_loss": run["losses"][0], "last_loss": run["losses"][-1]} for run in (ours, alone)]
    rows[0]["differing"], rows[1]["copies"] = report["elements_that_differ"], None
    say_first(out, report["accelerator"])
    say(out, hardware_line(report["hardware"], report["ranks"]))
    out.print(make_table("", _COLUMNS, [rows]))
    say(out, _verdict(ours, report["elements_that_differ"], report["elements"]))


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
