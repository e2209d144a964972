"""Runs a program under many schedules, and reports the simplest one under which it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from .accelerator import SimulatedAccelerator
from .schedule import Decision, Schedule

Program = Callable[[SimulatedAccelerator], Any]
_Deviations = dict[Decision, int]


class ScheduleError(AssertionError):
    """A program has failed under a schedule.

    The message says what failed, and prints the schedule: a line for each copy in the order in which they ran, with
    its stream and the bytes that it reads and writes, and for each wait of the host.

    Attributes:
        schedule: The failing schedule with the fewest deviations from first-in first-out order.
    """

    def __init__(self, error: Exception, schedule: Schedule, tried: int) -> None:
        what = (str(error) or repr(error)).partition("\n")[0]
        super().__init__(f"{type(error).__name__}: {what}\nThe simplest of {tried} schedules has {schedule}")
        self.schedule = schedule


def explore(program: Program, *, most: int = 20_000, pruned: bool = True, **options: Any) -> int:
    """Runs a program under every schedule that can make a difference, those with the fewest deviations first.

    For programs that queue a few copies: the number of schedules grows exponentially.

    Args:
        program: Is called with a new ``SimulatedAccelerator`` each time, and raises where something is wrong. It must
            do the same each time, but for what it sees of the accelerator.
        most: The most schedules to run.
        pruned: False: also under those that only move a copy to another moment at which its memory is the same.
        **options: For the ``SimulatedAccelerator``.

    Returns:
        The number of schedules.

    Raises:
        ScheduleError: The program has raised an ``Exception`` under one of them.
        RuntimeError: There are more than ``most``, or the program does not repeat itself.
    """
    return _explore(program, options, most, None, pruned)


def sample(program: Program, seeds: Iterable[int], *, most: int = 2_000, **options: Any) -> int:
    """Runs a program under one drawn schedule for each seed; for programs that queue too much for ``explore``.

    Args:
        program: As for ``explore``.
        seeds: Each draws a schedule.
        most: The most schedules to run in search of a simpler one that fails.
        **options: For the ``SimulatedAccelerator``.

    Returns:
        The number of schedules.

    Raises:
        ScheduleError: The program has raised an ``Exception`` under one of them. The schedule in it fails too, with as
            few deviations as the search has found.
    """
    number = 0
    for number, seed in enumerate(seeds, 1):
        schedule = Schedule(seed=seed)
        error = _run(program, schedule, options)
        if error is not None:
            raise _simplest(program, schedule, error, options, most, number) from error
    return number


def _run(program: Program, schedule: Schedule, options: dict[str, Any]) -> Exception | None:
    try:
        program(SimulatedAccelerator(schedule=schedule, **options))
    except Exception as error:  # noqa: BLE001 - whatever a program says is wrong
        return error
    return None


def _explore(program: Program, options: dict[str, Any], most: int, fewer_than: int | None, pruned: bool = True) -> int:
    """As ``explore``; with ``fewer_than``, only the schedules with fewer deviations, and no more than ``most``."""
    waiting: deque[_Deviations] = deque([{}])
    tried = 0
    while waiting:
        if tried == most:
            if fewer_than is None:
                raise RuntimeError(f"the program has more than {most} schedules: let it queue less, or use `sample`")
            break
        deviations = waiting.popleft()
        schedule = Schedule(deviations, pruned=pruned)
        error = _run(program, schedule, options)
        tried += 1
        if error is not None:
            raise ScheduleError(error, schedule, tried) from error
        if schedule.deviations != deviations:
            raise RuntimeError("the program does not repeat itself under the same schedule")
        if fewer_than is not None and len(deviations) + 1 >= fewer_than:
            continue
        begin = 1 + max((index for index, (key, _) in enumerate(schedule.made) if key in deviations), default=-1)
        waiting.extend(
            {**deviations, decision: option}
            for decision, number in schedule.made[begin:]
            for option in range(1, number)
        )
    return tried


def _simplest(
    program: Program, schedule: Schedule, error: Exception, options: dict[str, Any], most: int, tried: int
) -> ScheduleError:
    """Drops deviations while the program still fails, then looks for a failing schedule with still fewer."""
    number = len(schedule.deviations)
    while number:
        kept = list(schedule.deviations.items())
        for begin in range(0, len(kept), number):
            shorter = Schedule(dict(kept[:begin] + kept[begin + number :]))
            found = _run(program, shorter, options)
            tried += 1
            if found is not None and len(shorter.deviations) < len(schedule.deviations):
                schedule, error = shorter, found
                break
        else:
            number //= 2
        number = min(number, len(schedule.deviations))
    try:
        _explore(program, options, most, len(schedule.deviations))
    except ScheduleError as simpler:
        return simpler
    return ScheduleError(error, schedule, tried)
