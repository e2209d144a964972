"""The worker of ``h2d bench zero3``: one engine takes its steps with every copy-back in turn.

Masters are ordinary memory for the variants that need them so, and page-locked for those that page-lock
them in place; the same holds of DeepSpeed's swap buffers where masters are on NVMe. To page-lock for every
step would cost more than the step, and two transfers cannot both page-lock the same memory. So each round
has two halves: in the first the masters are as DeepSpeed made them; before the second, one transfer that
does nothing else page-locks them for all variants of that half, and is closed after it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...accelerator_choice import AcceleratorChoice
from ...routing import build_transfer
from ..measuring import bits
from ..measuring.copies import refusal
from ..measuring.hardware import describe
from ..measuring.progress import progress
from ..measuring.ranks import Ranks
from .engine import describe_engine, make_engine, start_deepspeed
from .on_nvme import as_in_a_step, masters, not_for_steps, sources
from .phases import timed
from .transformer import VOCABULARY
from .variants import Variant, make_variants, rewrite


def measure(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Measures the steps of every variant: a worker for ``ranks.launch``, with the command's options.

    Returns:
        ``hardware``, ``engine``, ``page_lock``, ``measurements`` and ``not_run`` (with reasons).
    """
    accelerator = AcceleratorChoice(options["accelerator"]).resolve()
    start_deepspeed(accelerator)
    engine = make_engine(options, accelerator)
    with contextlib.ExitStack() as closing:
        closing.callback(engine.destroy)
        bench = _Bench(options, ranks, accelerator, engine)
        for variant in make_variants(options, accelerator):
            closing.callback(variant.close)
            bench.add(variant)
        with progress((options["steps"] + 1) * len(bench.variants), visible=ranks.rank == 0) as advance:
            bench.rounds(advance)
        return {
            "hardware": describe(accelerator),
            "engine": describe_engine(engine),
            "page_lock": {"seconds_by_rank": ranks.gather(bench.page_lock_seconds)},
            "measurements": [_measurement(variant, ranks) for variant in bench.variants],
            "not_run": bench.not_run,
        }


class _Bench:
    """One engine and the variants that take turns on it."""

    def __init__(self, options: Mapping[str, Any], ranks: Ranks, accelerator: Any, engine: Any) -> None:
        from deepspeed.accelerator import get_accelerator

        self.options = options
        self.ranks = ranks
        self.accelerator = accelerator
        self.engine = engine
        self.tokens = torch.randint(VOCABULARY, (options["batch"], options["sequence"]), device=engine.device)
        # Where the host poses as the device, DeepSpeed would report the memory of the whole process.
        self.device = get_accelerator() if engine.device.type != "cpu" else None
        self.variants: list[Variant] = []
        self.not_run = not_for_steps(options)
        self.page_lock_seconds: list[float] = []

    def add(self, variant: Variant) -> None:
        """Takes a variant in if it can copy here on every rank, and finds out whether it page-locks the masters."""
        reason = refusal(self.ranks, lambda: self._try(variant))
        variant.page_locked_bytes = max(self.ranks.gather(variant.page_locked_bytes))
        if reason is None:
            self.variants.append(variant)
        else:
            self.not_run.append({"variant": variant.name, "reason": reason})

    def _try(self, variant: Variant) -> None:
        if variant.transfer is None:
            return
        partition, master = next(self._partitions())
        master = as_in_a_step(self.engine.optimizer, 0, master)
        locked_bytes = self._locked_bytes()
        started = time.perf_counter()
        try:
            with variant.attached(self.engine):
                variant.attach_seconds = time.perf_counter() - started
                variant.page_locked_bytes = self._locked_bytes() - locked_bytes
                variant.transfer.copy(partition, master)
                used = (name for name, counts in variant.transfer.stats().items() if counts.copies)
                variant.selected = next(used, None)
        finally:
            variant.close()  # the masters are ordinary memory again

    def rounds(self, advance: Callable[[str], None]) -> None:
        """One step of every variant a round. Round 0 warms up; it and the last one are compared bit for bit."""
        began = time.perf_counter()
        for number in range(self.options["steps"] + 1):
            spent = max(self.ranks.gather(time.perf_counter() - began))
            # A round takes as long as those before it.
            next_to_last = spent * (number + 2) / number if number else 0.0
            last = number == self.options["steps"] or next_to_last > (self.options["limit_seconds"] or float("inf"))
            self.round(number, number == 0 or last, advance)
            if last:
                return

    def round(self, number: int, checked: bool, advance: Callable[[str], None]) -> None:
        """One step of every variant; where ``checked``, the partitions are compared bit for bit."""
        page_locking = [variant for variant in self.variants if variant.page_locked_bytes]
        for variant in self.variants:
            if variant not in page_locking:
                self._step(variant, number > 0, checked)
                advance(variant.name)
        if not page_locking:
            return
        locked_bytes = self._locked_bytes()
        # Held for the round, so that they are page-locked once for all of these variants.
        with build_transfer(page_locking[0].config, self.accelerator) as holder:
            started = time.perf_counter()
            for memory in sources(self.engine.optimizer):
                holder.prepare(memory)
            self.page_lock_seconds.append(time.perf_counter() - started)
            for variant in page_locking:
                self._step(variant, number > 0, checked)
                advance(variant.name)
        if self._locked_bytes() > locked_bytes:  # some variant page-locks more than the holder did
            for variant in page_locking:
                variant.close()

    def _locked_bytes(self) -> int:
        """Bytes that copy-backs of this rank leave from and the device can read directly."""
        return sum(memory.nbytes for memory in sources(self.engine.optimizer) if self.accelerator.is_pinned(memory))

    def _step(self, variant: Variant, counted: bool, checked: bool) -> None:
        checked = checked and variant.copies
        allocated = 0

        def before_step() -> None:
            nonlocal allocated
            if checked:
                for partition in self.engine.optimizer.fp16_partitioned_groups_flat:
                    bits.poison(partition.data)
            if self.device is not None:
                self.device.reset_peak_memory_stats()
                allocated = self.device.memory_allocated()

        with variant.attached(self.engine):
            phases = timed(
                lambda: self.engine(self.tokens),
                self.engine.backward,
                self.engine.step,
                self.ranks,
                self.accelerator,
                before_step,
            )
        if counted:
            variant.phases.append(phases)
            if self.device is not None:
                variant.memory_rises.append(self.device.max_memory_allocated() - allocated)
        right = not checked or all(bits.same_bits(*pair) for pair in self._partitions())
        variant.right_bits &= right
        if not all(self.ranks.gather(right)) or not variant.copies:
            rewrite(self.engine)  # so that the next variant begins with the right model

    def _partitions(self) -> Iterator[tuple[Any, Any]]:
        """The low-precision partition and the master of each sub-group, as they are now."""
        optimizer = self.engine.optimizer
        for partition, master in zip(optimizer.fp16_partitioned_groups_flat, masters(optimizer), strict=True):
            yield partition.data, master


def _measurement(variant: Variant, ranks: Ranks) -> dict[str, Any]:
    """What was measured of a variant, on all ranks together."""
    transfer = variant.transfer
    own = {
        "attach_seconds": variant.attach_seconds,
        "pinned_bytes": 0 if transfer is None else transfer.pinned_bytes - transfer.page_locked_bytes,
        "scratch_bytes": 0 if transfer is None else transfer.scratch_bytes,
        "memory_rise_bytes": max(variant.memory_rises, default=None),
    }
    right_bits = ranks.gather(variant.right_bits)
    return {
        "variant": variant.name,
        "selected": variant.selected,
        "page_locked_bytes": variant.page_locked_bytes,
        "right_bits": all(right_bits) if variant.copies else None,
        **ranks.largest(own),
        "forward_seconds_by_rank": ranks.gather([each.forward for each in variant.phases]),
        "backward_seconds_by_rank": ranks.gather([each.backward for each in variant.phases]),
        "step_seconds_by_rank": ranks.gather([each.step for each in variant.phases]),
        "iteration_seconds_by_rank": ranks.gather([sum(each) for each in variant.phases]),
    }
