"""Draws how one copy and one step go. Nothing in these pictures was measured.

python docs/pictures/draw_schematics.py docs/pictures
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from drawing import ADAM, CAST, DEVICE, LINK, WAIT, lanes, new_figure, save

#: Of a lane: begin, length, colour, words.
Block = tuple[float, float, str, str]


def blocks(axes: Any, place: int, given: list[Block]) -> None:
    """Draws the blocks of one lane, with their words in them."""
    for begin, length, colour, words in given:
        axes.broken_barh([(begin, length)], (place - 0.38, 0.76), color=colour, edgecolor="white", linewidth=1)
        ink = "#333333" if colour in (CAST, WAIT) else "white"
        axes.text(begin + length / 2, place, words, ha="center", va="center", fontsize=8, color=ink)


def one_copy() -> Any:
    """The ways of one copy of four chunks."""
    figure, panels = new_figure(9, 6.6, 4)
    names = ["host", "link", "device"]
    staged_link = [(1.5 + 1.5 * i, 1.0, LINK, f"bf16 {i + 1}") for i in range(4)]
    ways: list[tuple[str, list[list[Block]]]] = [
        (
            "pageable: the host casts all, then waits for a copy in pieces",
            [
                [
                    (0, 4, CAST, "cast all, into ordinary memory"),
                    (4, 7, WAIT, "copies pieces to the driver's buffer, waits"),
                ],
                [(4 + 0.9 * i, 0.45, LINK, "") for i in range(8)],
                [],
            ],
        ),
        (
            "pinned_staged: the host casts a chunk while the one before is copied",
            [[(1.5 * i, 1.5, CAST, f"cast {i + 1}") for i in range(4)], staged_link, []],
        ),
        (
            "pinned_direct, in chunks: the device casts, the host is free",
            [
                [(0, 0.5, WAIT, "queue")],
                [(0.5 + 1.2 * i, 1.2, LINK, f"fp32 {i + 1}") for i in range(4)],
                [(1.7 + 1.2 * i, 0.35, DEVICE, "cast") for i in range(4)],
            ],
        ),
        (
            "pinned_direct, mapped: one kernel reads the host's memory and casts",
            [[(0, 0.5, WAIT, "queue")], [(0.5, 5.0, LINK, "fp32")], [(0.5, 5.0, DEVICE, "cast as it arrives")]],
        ),
    ]
    for axes, (title, lane_blocks) in zip(panels, ways, strict=True):
        lanes(axes, names, title)
        for place, given in enumerate(lane_blocks):
            blocks(axes, place, given)
        axes.set_xlim(0, 11.3)
        axes.set_xticks([])
    panels[-1].set_xlabel("time, not to scale")
    return figure


def one_step() -> Any:
    """A step of three sub-groups, and of their tiles."""
    figure, panels = new_figure(9, 4.6, 2)
    names = ["host: CPU Adam", "host: casts", "link", "device"]
    before, after = panels
    lanes(before, names, "DeepSpeed alone: each copy-back is waited for")
    for i in range(3):
        begin = 4.4 * i
        blocks(before, 0, [(begin + 0.6, 1.6, ADAM, f"update {i + 1}")])
        blocks(before, 1, [(begin, 0.6, CAST, "scale"), (begin + 2.2, 0.8, CAST, f"cast {i + 1}")])
        blocks(before, 2, [(begin + 3.0, 1.4, LINK, f"copy {i + 1}")])
    blocks(before, 3, [(13.2, 0.8, DEVICE, "gather")])
    lanes(after, names, "with this package: tiles are updated while those before them are copied")
    for i in range(9):
        sub_group, begin = i // 3 + 1, 0.78 * i
        blocks(after, 1, [(begin, 0.24, CAST, "")])
        blocks(after, 0, [(begin + 0.24, 0.54, ADAM, str(sub_group))])
        blocks(after, 2, [(begin + 0.80, 0.62, LINK, str(sub_group))])
        blocks(after, 3, [(begin + 0.96, 0.46, DEVICE, "cast")])
    blocks(after, 3, [(7.75, 0.8, DEVICE, "gather")])
    for axes, end in ((before, 13.2), (after, 7.7)):
        axes.axvline(end, color="black", linewidth=1, linestyle=":")
        axes.set_xlim(0, 14.2)
        axes.set_xticks([])
    after.set_xlabel("time, not to scale; dotted: ZeRO-3 goes on")
    return figure


def main() -> None:
    """Writes both pictures to a directory."""
    folder = Path(sys.argv[1])
    save(one_copy(), folder / "one_copy.svg")
    save(one_step(), folder / "one_step.svg")


if __name__ == "__main__":
    main()
