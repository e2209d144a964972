"""Draws what ``trace_step.py`` has recorded: a lane each for CPU Adam, casts, the link and the device.

python docs/pictures/draw_timeline.py RECORD.json PICTURE.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drawing import ADAM, CAST, DEVICE, LINK, lanes, new_figure, save

#: From top to bottom: the name in the record, the words beside the lane, its colour.
LANES = (
    ("adam", "CPU Adam", ADAM),
    ("cast", "cast, on the host", CAST),
    ("link", "link", LINK),
    ("device", "device", DEVICE),
)


def draw(record: Mapping[str, Any], file: Path) -> None:
    """Writes one panel for each iteration, over one axis of time."""
    iterations = record["iterations"]
    figure, panels = new_figure(9, 1.75 * len(iterations) + 0.8, len(iterations))
    end = max(each["milliseconds"] for each in iterations.values())
    for axes, (name, iteration) in zip(panels, iterations.items(), strict=True):
        for place, (lane, _, colour) in enumerate(LANES):
            axes.broken_barh(iteration["lanes"][lane], (place - 0.36, 0.72), color=colour, linewidth=0)
        axes.axvline(iteration["milliseconds"], color="black", linewidth=1)
        axes.set_xlim(0, end * 1.02)
        lanes(axes, [words for _, words, _ in LANES], f"{name}: {iteration['milliseconds']:.0f} ms")
    panels[-1].set_xlabel("milliseconds since the iteration began (forward, backward, step)")
    hardware = record["hardware"]
    figure.suptitle(
        f"One iteration, {record['parameters'] / 1e9:.2f} billion parameters, {record['tokens']:,} tokens, "
        f"{hardware['device'] or hardware['accelerator']}, {hardware['threads']} host threads, under torch's profiler",
        fontsize=9,
        color="#555555",
    )
    save(figure, file)


def main() -> None:
    """Reads the record and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.record.read_text()), options.picture)


if __name__ == "__main__":
    main()
