"""Whose turn each step is.

To attach and to detach changes where gradients are and what is page-locked, so turns are blocks of steps. The first
step after each change is not counted: it makes buffers anew. Two blocks, one of each way, are a pair: a machine that
drifts changes both alike. The order within pairs alternates, so that what drifts in one direction cancels out.
"""

from __future__ import annotations

from typing import NamedTuple

OURS, DEEPSPEED = "with this package", "DeepSpeed alone"
#: Of the first step, which makes the optimizer's state, and of the one after it.
_WARM_UP = 2
#: Counted steps of a block, at most.
_BLOCK = 4


class Turn(NamedTuple):
    """One step: whose it is, and the number of its pair of blocks; None where the step is not counted."""

    way: str
    pair: int | None


def turns(steps: int) -> list[Turn]:
    """The turns of a comparison with so many counted steps of each way.

    An engine begins attached, so its first block is ours.
    """
    pairs = -(-steps // _BLOCK)
    found = [Turn(OURS, None)] * (_WARM_UP - 1)
    before = None
    for pair in range(pairs):
        size = steps // pairs + (pair < steps % pairs)
        for way in (OURS, DEEPSPEED) if pair % 2 == 0 else (DEEPSPEED, OURS):
            found += [Turn(way, None)] * (way != before) + [Turn(way, pair)] * size
            before = way
    return found
