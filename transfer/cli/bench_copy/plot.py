"""A picture of the rate of every variant against the size of the copy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What can be written, by the file's suffix.
SUFFIXES = (".png", ".svg", ".pdf")


def why_no_plot(path: Path) -> str | None:
    """Why nothing could be written to ``path``, so that it is known before anything is measured; or None."""
    if path.suffix.lower() not in SUFFIXES:
        return f"{path}: expected a file name that ends in {', '.join(SUFFIXES)}"
    if not path.parent.is_dir():
        return f"{path}: there is no directory {path.parent}"
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        return "it needs matplotlib: python -m pip install 'host-to-device-transfer[plot]'"
    return None


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Writes one diagram for each dtype, side by side. Needs the extra ``plot``."""
    import matplotlib as mpl
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    measurements = report["measurements"]
    dtypes = list(dict.fromkeys(one["dtype"] for one in measurements))
    width = 7 if report["nvme"] is None else 10  # with a legend beside it
    figure = Figure(figsize=(width * len(dtypes), 5), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        axes.set_prop_cycle(color=mpl.color_sequences["tab20"])
        lines: dict[tuple[str, bool], list[tuple[int, float]]] = {}
        for one in measurements:
            if one["dtype"] == dtype:
                point = (one["destination_bytes"], one["figures"]["gigabytes_per_second"])
                lines.setdefault((one["variant"], one["from_file"]), []).append(point)
        for (variant, from_file), points in lines.items():
            style = "--" if from_file else "-"
            axes.plot(*zip(*sorted(points), strict=True), style, marker="s" if from_file else "o", label=variant)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("destination bytes")
        axes.set_ylabel("GB/s of destination bytes, median")
        title = f"float32 on the host to {dtype} on {report['hardware']['accelerator']}"
        if report["nvme"] is None:
            axes.set_ylim(bottom=0)
            axes.legend()
        else:  # a drive is slower than memory by more than a linear axis shows, and the lines are many
            axes.set_yscale("log")
            title += f"; dashed: from a file on {report['nvme']['file_system']}"
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    figure.savefig(path)
