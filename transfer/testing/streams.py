"""Order between streams, and threads that share a transfer."""

from __future__ import annotations

import threading

import torch

from accelerators import Accelerator
from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import skip_without

from ..interface import HostToDeviceTransfer
from ._hooks import GUARD, Hooks, read


class Ordering(Hooks):
    """Contract, point 6, and threads."""

    def test_runs_after_work_queued_before_it(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        old = accelerator.device_empty(200_000, dtype=torch.bfloat16)
        old.fill_(GUARD)
        destination = accelerator.device_empty(200_000, dtype=torch.bfloat16)
        for _ in range(20):
            accelerator.enqueue_copy(destination, old)
        transfer.copy(destination, torch.ones(200_000))
        assert (read(accelerator, destination) == 1).all()

    def test_a_side_stream_is_used_when_current(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        skip_without(accelerator, "streams")
        old = accelerator.device_empty(200_000, dtype=torch.bfloat16)
        old.fill_(GUARD)
        destination = accelerator.device_empty(200_000, dtype=torch.bfloat16)
        accelerator.synchronize()
        assert accelerator.Stream is not None
        with accelerator.stream(accelerator.Stream()):
            for _ in range(20):
                accelerator.enqueue_copy(destination, old)
            transfer.copy(destination, torch.ones(200_000))
        assert (read(accelerator, destination) == 1).all()

    def test_order_after_makes_another_stream_see_the_values(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        skip_without(accelerator, "streams")
        destination, seen = (accelerator.device_empty(200_000, dtype=torch.bfloat16) for _ in range(2))
        accelerator.synchronize()
        assert accelerator.Stream is not None
        consumer = accelerator.Stream()
        copy = transfer.submit(destination, torch.full((200_000,), 4.0))
        was_done = copy.done
        copy.order_after(consumer)
        if isinstance(accelerator, SimulatedAccelerator):
            assert copy.done == was_done, "order_after must not make the host wait"
        with accelerator.stream(consumer):
            accelerator.enqueue_copy(seen, destination)
        consumer.synchronize()
        assert (seen.cpu() == 4).all()
        copy.wait()

    def test_wait_is_idempotent_and_done_becomes_true(
        self, accelerator: Accelerator, transfer: HostToDeviceTransfer
    ) -> None:
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(3000.0))
        copy.wait()
        copy.wait()
        assert copy.done
        assert torch.equal(read(accelerator, destination), torch.arange(3000.0).bfloat16())
        copy.order_after(accelerator.current_stream())
        copy.release_source()

    def test_done_becomes_true_by_asking(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destination = accelerator.device_empty(3000, dtype=torch.bfloat16)
        copy = transfer.submit(destination, torch.arange(3000.0))
        for _ in range(1_000_000):
            if copy.done:
                break
        assert copy.done
        assert torch.equal(read(accelerator, destination), torch.arange(3000.0).bfloat16())

    def test_two_copies_in_flight(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        destinations = [accelerator.device_empty(2500, dtype=torch.bfloat16) for _ in range(4)]
        copies = [
            transfer.submit(destination, torch.full((2500,), float(i))) for i, destination in enumerate(destinations)
        ]
        for copy in reversed(copies):
            copy.wait()
        for i, destination in enumerate(destinations):
            assert (destination.cpu() == i).all()

    def test_threads_share_one_transfer(self, accelerator: Accelerator, transfer: HostToDeviceTransfer) -> None:
        wrong: list[str] = []

        def work(value: float) -> None:
            try:
                for numel in (1, 1000, 10_007) * 17:
                    destination = accelerator.device_empty(numel, dtype=torch.bfloat16)
                    transfer.copy(destination, torch.full((numel,), value))
                    if not (destination.cpu() == value).all():
                        wrong.append(f"thread {value} saw other values")
            except Exception as error:  # noqa: BLE001 - a thread's error must reach the test
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(float(i + 1),), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        assert not wrong
