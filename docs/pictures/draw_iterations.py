"""Draws the peers of a record of ``h2d bench zero3 --peers``: forward, backward and step of one iteration.

python docs/pictures/draw_iterations.py examples/figures/peers_h200.json docs/pictures/iterations_h200.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from drawing import ADAM, DEVICE, LINK, new_figure, save

#: The peers that are drawn, from top to bottom, and what they are called.
PEERS = {
    "deepspeed": "DeepSpeed ZeRO-3",
    "default": "with this package",
    "offload_param": "ZeRO-3, offload_param too",
    "fsdp2": "FSDP2, CPU offload",
    "superoffload": "SuperOffload",
}
PHASES = (("forward", DEVICE), ("backward", LINK), ("step", ADAM))


def main() -> None:
    """Reads the record and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    figures = {peer["variant"]: peer["figures"] for peer in record["peers"]}
    figure, (axes,) = new_figure(9, 2.9, 1)
    for place, (name, words) in enumerate(PEERS.items()):
        begin, is_ours = 0.0, name == "default"
        for phase, colour in PHASES:
            length = figures[name][f"median_{phase}_seconds"]
            axes.barh(place, length, left=begin, color=colour, height=0.62, label=phase if place == 0 else None)
            begin += length
        whole = figures[name]["median_iteration_seconds"]
        axes.text(begin + 0.008, place, f"{whole:.2f} s", va="center", weight="bold" if is_ours else "normal")
        axes.text(-0.008, place, words, va="center", ha="right", weight="bold" if is_ours else "normal")
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    device, parameters = record["hardware"]["device"], record["engine"]["parameters"]
    axes.set_xlabel(f"seconds of one iteration: {device}, {parameters / 1e9:.2f} billion parameters")
    axes.legend(loc="lower right", frameon=False, ncols=3, bbox_to_anchor=(1, 1))
    save(figure, options.picture)


if __name__ == "__main__":
    main()
