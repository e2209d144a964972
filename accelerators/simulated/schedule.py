"""One order in which a simulated device runs what is queued, and a record of it that can be read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

#: Which decision it is: what is decided, the number of the copy it is about, and how often that was decided before.
Decision = tuple[str, int, int]


class Schedule:
    """First-in first-out order, but for the deviations.

    In first-in first-out order each copy runs as soon as it is queued and its stream allows. Where a deviation says so,
    it is held back: until the host waits for it, or until another deviation lets it run. Give one to
    ``SimulatedAccelerator(schedule=...)``, for one run of a program; ``explore`` and ``sample`` make them.

    Args:
        deviations: The decisions that are not made as in first-in first-out order, and the option taken, from 1.
        seed: Draws the deviations in place of that.
        pruned: Leaves out decisions that make no difference. False: a copy that is held back may run at any moment.

    Attributes:
        made: Every decision of the run in turn, with the number of its options; option 0 is first-in first-out.
        deviations: Those of them that were made in another way.
    """

    def __init__(
        self, deviations: Mapping[Decision, int] | None = None, seed: int | None = None, *, pruned: bool = True
    ) -> None:
        self.pruned = pruned
        self._wanted = dict(deviations or {})
        self._random = None if seed is None else random.Random(seed)
        self._often = 0.0 if self._random is None else self._random.choice((0.1, 0.5, 0.9))
        self._counts: Counter[tuple[str, int]] = Counter()
        self.made: list[tuple[Decision, int]] = []
        self.deviations: dict[Decision, int] = {}
        self._lines: list[str] = []
        self._queued: dict[int, str] = {}

    def decide(self, what: str, copy: int, options: int) -> int:
        """Makes one decision: an option from 0, which is first-in first-out."""
        decision = (what, copy, self._counts[what, copy])
        self._counts[what, copy] += 1
        self.made.append((decision, options))
        if self._random is None:
            chosen = self._wanted.get(decision, 0)
        else:
            chosen = self._random.randrange(1, options) if self._random.random() < self._often else 0
        if chosen:
            self.deviations[decision] = chosen
            self._lines.append(f"* copy {copy} {what}")
        return chosen

    def queued(self, copy: int, text: str) -> None:
        """Keeps what a copy does until it has run."""
        self._queued[copy] = f"copy {copy}, {text}"

    def ran(self, copy: int, *, races: bool) -> None:
        """Notes that a copy has run; with ``races``, at the same time as another one that uses its memory."""
        line = self._queued.pop(copy, None)
        if line is not None:
            self._lines.append(line + ", in a race" * races)

    def waits(self) -> None:
        """Notes that the host waits."""
        self._lines.append("the host waits")

    @property
    def lines(self) -> list[str]:
        """What has run, in turn; each deviation, after a star; and what is queued still."""
        return [*self._lines, *(f"{line}, has not run" for line in self._queued.values())]

    def __str__(self) -> str:
        number = len(self.deviations)
        title = f"{number} deviation{'s' * (number != 1)} from first-in first-out order:"
        return "\n  ".join([title, *self.lines])
