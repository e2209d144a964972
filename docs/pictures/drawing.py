"""What all pictures have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ADAM, CAST, LINK, DEVICE, WAIT = "#d1495b", "#edae49", "#00798c", "#5b5f97", "#dddddd"


def new_figure(width: float, height: float, panels: int) -> tuple[Any, list[Any]]:
    """A figure with panels below each other, over one axis of time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    mpl.rcParams.update({"font.size": 10, "svg.hashsalt": "h2d"})  # so that the same picture is the same file
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])


def lanes(axes: Any, names: list[str], title: str) -> None:
    """Lanes from top to bottom, with nothing around them."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")


def save(figure: Any, file: Path) -> None:
    """Writes the figure; the same figure gives the same bytes of an SVG."""
    figure.savefig(file, dpi=130, facecolor="white", metadata={"Date": None} if file.suffix == ".svg" else None)
    if file.suffix == ".svg":
        lines = file.read_text().splitlines()
        file.write_text("\n".join(line.rstrip() for line in lines) + "\n")
