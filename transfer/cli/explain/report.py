"""How ``h2d explain`` shows what would be chosen, in 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.padding import Padding
from rich.text import Text

from ...stats import format_bytes
from ..measuring.quantities import format_count
from ..measuring.report import console, say


def show(report: Mapping[str, Any]) -> None:
    """Prints each sub-group's choice, the reason, and what would change it."""
    out = console(width=80)
    simulated = " (simulated: it tests bits, not speed)" if report["accelerator"] == "simulated" else ""
    say(out, f"To {report['accelerator']}{simulated}, float32 on the host to {report['dtype']} on the device:")
    for one in report["sub_groups"]:
        state = "page-locked when ZeRO-3 is attached" if one["page_locked"] else "not page-locked"
        heading = Text(f"\n{format_count(one['elements'])} elements ({format_bytes(one['bytes'])}), {state}: ")
        heading.append(one["strategy"], style="bold")
        out.print(heading)
        out.print(Padding(Text(one["reason"]), (0, 0, 0, 2)))
        for change in one["changes"]:
            line = Text(f"{change['strategy']} if {change['if']}")
            out.print(Padding(line, (0, 0, 0, 4)))
        if not one["changes"]:
            out.print(Padding(Text("Nothing that was tried would change it."), (0, 0, 0, 4)))
    locks = report["page_locks"]
    allowed = "an unknown number of bytes" if locks["allowed_bytes"] is None else format_bytes(locks["allowed_bytes"])
    say(out, f"\nPage-locked for one of each: {format_bytes(locks['wanted_bytes'])}; a rank may page-lock {allowed}.")
    if locks["allowed_bytes"] is not None and locks["wanted_bytes"] > locks["allowed_bytes"]:
        say(out, "Sources beyond that are not page-locked, and take what is said for such.")
    for sentence in (*report["warnings"], *report["notes"]):
        say(out, sentence)
