"""A progress bar for people. Programs that read the output never see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, *, visible: bool = True) -> Iterator[Callable[[str], None]]:
    """Yields ``advance(what was just done)``. Draws on the standard error, and only on a terminal.

    It is drawn within ``advance`` alone: a thread that redraws would disturb what is measured.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not (visible and console.is_terminal),
    )
    with bar:
        task = bar.add_task("", total=total)

        def advance(description: str) -> None:
            bar.update(task, advance=1, description=description, refresh=True)

        yield advance
