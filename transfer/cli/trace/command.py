"""``h2d trace FILE``: copies from pageable memory in a trace of torch's profiler, and what they cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..arguments import Parser
from ..measuring.options import tell
from ..measuring.quantities import positive
from .figures import figures
from .gathering import Facts, gather
from .reading import TraceError, events

SCHEMA_VERSION = 1

DESCRIPTION = """\
Are copies from pageable memory my problem? Reads a trace that torch's profiler
has exported of your own run, with or without this package, and says for a step:
copies from the host to the device by the memory that they leave from, their
bytes and seconds, how much of that time the device computed and the host was
free, which of them a strategy of this package would take, and what that saves.

To record a trace of a few steps, put this around your training loop, and call
`p.step()` after each step:

  with torch.profiler.profile(
      schedule=torch.profiler.schedule(wait=2, warmup=1, active=3),
      on_trace_ready=lambda p: p.export_chrome_trace("trace.json.gz"),
  ) as p:

Traces of CUDA tell the memory. Those of ROCm and XPU do not; their copies are
counted as `not told`.
"""


def main(arguments: Sequence[str]) -> int:
    """Prints what was found; returns the exit status."""
    options = make_parser().parse_args(arguments)
    try:
        facts, count = _read(options.file)
    except TraceError as error:
        print(f"h2d trace: {error}", file=sys.stderr)
        return 1
    if not (facts.copies or facts.kernels or facts.made or facts.submitted):
        what = f"{count:,} events and none of a device" if count else "no events"
        print(
            f"h2d trace: {options.file} has {what}: record with the device's activities (ProfilerActivity.CUDA, ...)",
            file=sys.stderr,
        )
        return 1
    from .report import show, verdict

    found = figures(facts, options.link and options.link * 1e9)
    report = {
        "schema_version": SCHEMA_VERSION,
        "command": "trace",
        "file": Path(options.file).name,
        "events": count,
        **found,
    }
    tell({**report, "verdict": verdict(found)}, options, show)
    return 0


def _read(file: str) -> tuple[Facts, int]:
    """What a file has, and the number of its events.

    Raises:
        TraceError: It cannot be read.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    count = 0

    def counted(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        nonlocal count
        for count, event in enumerate(found, 1):  # noqa: B007 - the last number is what is wanted
            yield event

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        size = Path(file).stat().st_size if Path(file).is_file() else None
        task = bar.add_task("reading", total=size)
        facts = gather(counted(events(file, lambda done: bar.update(task, completed=done))))
    return facts, count


def make_parser() -> Parser:
    """The command's arguments."""
    parser = Parser(
        prog="h2d trace",
        description=DESCRIPTION,
        epilog="Exit status: 0; 1 where the file has no answer;\n2 where the arguments are wrong.",
    )
    parser.add_argument("file", metavar="FILE", help="as `export_chrome_trace` writes it: .json, or packed as .json.gz")
    link = "of the link (default: what large pinned copies of the trace reach, else 52.7)"
    parser.add_argument("--link", type=positive, metavar="GB/S", help=link)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
