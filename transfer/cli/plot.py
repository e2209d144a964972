"""A picture of the rate of every scheme against the size of the copy."""

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
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    measurements = report["measurements"]
    dtypes = list(dict.fromkeys(one["dtype"] for one in measurements))
    figure = Figure(figsize=(7 * len(dtypes), 5), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for one in measurements:
            if one["dtype"] == dtype:
                point = (one["destination_bytes"], one["figures"]["gigabytes_per_second"])
                lines.setdefault(one["scheme"], []).append(point)
        for scheme, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=scheme)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("destination bytes")
        axes.set_ylabel("GB/s of destination bytes, median")
        axes.set_ylim(bottom=0)
        axes.set_title(f"float32 on the host to {dtype} on {report['hardware']['accelerator']}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
