"""Order between streams, and threads that share a transfer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import check_values, skip_without

from ..interface import HostToDeviceTransfer
from ._hooks import (
    DTYPES,
    GUARD,
    Hooks,
    as_it_is_and_cast,
    check_copy,
    described,
    each_kind_of_source,
    host_source,
    kinds_here,
    random_bits,
)

#: So many elements keep a real device busy for a while; a copy under test is to a part of them.
_MANY = 200_000


class Ordering(Hooks):
    """Contract, point 6, and threads."""

    @each_kind_of_source
    @as_it_is_and_cast
    def test_runs_after_work_queued_before_it(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, kind: str, dtype: torch.dtype
    ) -> None:
        self._copy_behind_others(accelerator, transfer, kind, dtype, None)

    @each_kind_of_source
    @as_it_is_and_cast
    def test_a_side_stream_is_used_when_current(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, kind: str, dtype: torch.dtype
    ) -> None:
        skip_without(accelerator, "streams")
        assert accelerator.Stream is not None
        self._copy_behind_others(accelerator, transfer, kind, dtype, accelerator.Stream())

    def _copy_behind_others(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, kind: str, dtype: torch.dtype, stream: Any
    ) -> None:
        old, memory = (accelerator.device_empty(_MANY, dtype=dtype) for _ in range(2))
        old.fill_(GUARD)
        values = random_bits(self.several_chunks, seed=6)
        destination = memory[-self.several_chunks :]
        accelerator.synchronize()
        with host_source(accelerator, transfer, values, kind) as source:
            with nullcontext() if stream is None else accelerator.stream(stream):
                for _ in range(20):
                    accelerator.enqueue_copy(memory, old)
                transfer.copy(destination, source)
            check_copy(accelerator, destination, values.to(dtype), described(kind, dtype))

    @each_kind_of_source
    @as_it_is_and_cast
    def test_order_after_makes_another_stream_see_the_values(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, kind: str, dtype: torch.dtype
    ) -> None:
        skip_without(accelerator, "streams")
        assert accelerator.Stream is not None
        values = random_bits(self.several_chunks if isinstance(accelerator, SimulatedAccelerator) else _MANY, seed=7)
        destination, seen = (accelerator.device_empty(values.numel(), dtype=dtype) for _ in range(2))
        with host_source(accelerator, transfer, values, kind) as source:
            consumer = accelerator.Stream()
            copy = transfer.submit(destination, source)
            was_done = copy.done
            copy.order_after(consumer)
            if isinstance(accelerator, SimulatedAccelerator):
                assert copy.done == was_done, "order_after must not make the host wait"
            with accelerator.stream(consumer):
                accelerator.enqueue_copy(seen, destination)
            consumer.synchronize()
            check_values(seen, values.to(dtype), f"{described(kind, dtype)}: on another stream")
            copy.wait()

    @each_kind_of_source
    @as_it_is_and_cast
    def test_wait_is_idempotent_and_done_becomes_true(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, kind: str, dtype: torch.dtype
    ) -> None:
        values = random_bits(self.several_chunks, seed=8)
        destination = accelerator.device_empty(values.numel(), dtype=dtype)
        with host_source(accelerator, transfer, values, kind) as source:
            copy = transfer.submit(destination, source)
            copy.wait()
            copy.wait()
            assert copy.done
            check_copy(accelerator, destination, values.to(dtype), described(kind, dtype))
            copy.order_after(accelerator.current_stream())
            copy.release_source()

    @each_kind_of_source
    @as_it_is_and_cast
    def test_done_becomes_true_by_asking(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, kind: str, dtype: torch.dtype
    ) -> None:
        values = random_bits(self.several_chunks, seed=9)
        destination = accelerator.device_empty(values.numel(), dtype=dtype)
        with host_source(accelerator, transfer, values, kind) as source:
            copy = transfer.submit(destination, source)
            for _ in range(1_000_000):
                if copy.done:
                    break
            assert copy.done
            check_copy(accelerator, destination, values.to(dtype), f"{described(kind, dtype)}: when done was true")

    def test_copies_in_flight_of_every_kind(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        copies = []
        with ExitStack() as sources:
            for seed, (kind, dtype) in enumerate((kind, dtype) for kind in kinds_here(accelerator) for dtype in DTYPES):
                values = random_bits(self.several_chunks, seed)
                destination = accelerator.device_empty(values.numel(), dtype=dtype)
                source = sources.enter_context(host_source(accelerator, transfer, values, kind))
                copy = transfer.submit(destination, source)
                copies.append((copy, destination, values.to(dtype), described(kind, dtype)))
            for copy, destination, expected, what in reversed(copies):
                copy.wait()
                check_values(destination, expected, what)

    def test_threads_share_one_transfer(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        wrong: list[str] = []

        def work(number: int, kind: str, dtype: torch.dtype) -> None:
            try:
                with self._sources(accelerator, transfer, float(number + 1), kind) as sources:
                    for source in sources * 17:
                        destination = accelerator.device_empty(source.numel(), dtype=dtype)
                        transfer.copy(destination, source)
                        check_values(destination, source.to(dtype), f"thread {number}: {described(kind, dtype)}")
            except BaseException as error:  # noqa: BLE001 - a thread's error, or skip, must reach the test
                wrong.append(str(error) or repr(error))

        kinds = kinds_here(accelerator)
        threads = [
            threading.Thread(target=work, args=(number, kinds[number % len(kinds)], DTYPES[number % 2]), daemon=True)
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        assert not wrong, wrong[0]

    @contextmanager
    def _sources(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer, value: float, kind: str
    ) -> Iterator[list[Tensor]]:
        with ExitStack() as sources:
            yield [
                sources.enter_context(host_source(accelerator, transfer, torch.full((numel,), value), kind))
                for numel in (1, 1000, 3 * self.several_chunks)
            ]
