"""Every strategy under every order in which the device may run its copies; a forgotten wait is found and printed."""

import pytest
import torch

from accelerators.simulated import ScheduleError, explore, sample
from transfer import NvmeSwappedTransfer, PageableTransfer, PinnedDirectTransfer, PinnedStagedTransfer
from transfer.in_flight import EventCopy
from transfer.memory.scratch_ring import ScratchRing
from transfer.memory.staging_ring import StagingBuffer
from transfer.nvme import swap_out
from transfer.testing import random_bits


def pageable(accelerator):
    return PageableTransfer(accelerator=accelerator)


def staged(accelerator):
    return PinnedStagedTransfer(accelerator=accelerator, chunk_elements=2)


def in_chunks(accelerator):
    return PinnedDirectTransfer(accelerator=accelerator, mapped=False, chunk_elements=4)


def mapped(accelerator):
    return PinnedDirectTransfer(accelerator=accelerator)


#: What makes the transfer, elements, and the dtype of the destination: at most six operations are queued.
COPIES = {
    "pageable": (pageable, 8, torch.bfloat16),
    "staged": (staged, 12, torch.bfloat16),  # six chunks through two buffers
    "staged as it is": (staged, 12, torch.float32),
    "direct in chunks": (in_chunks, 12, torch.bfloat16),  # three chunks, each copied and cast, on two streams
    "direct in chunks as it is": (in_chunks, 24, torch.float32),
    "direct mapped": (mapped, 8, torch.bfloat16),
    "direct mapped as it is": (mapped, 8, torch.float32),
}


def copy_of(make, numel, dtype, copies=1):
    """Copies page-locked values, changes the source as soon as it is free, and closes."""

    def program(accelerator):
        expected, waits = [], []
        with make(accelerator) as transfer:
            source = torch.empty(numel)
            transfer.prepare(source)
            for seed in range(copies):
                source.copy_(random_bits(numel, seed))
                destination = accelerator.device_empty(numel, dtype=dtype)
                expected.append((destination, source.to(dtype, copy=True)))
                waits.append(transfer.submit(destination, source))
                waits[-1].release_source()
                source.fill_(7)
            for copy, (destination, values) in zip(waits, expected, strict=True):
                copy.wait()
                assert torch.equal(destination, values), "wrong values"
        assert accelerator.pinned_bytes == 0

    return program


@pytest.mark.parametrize("name", COPIES)
def test_every_order_of_a_copy_gives_its_values(name, schedule_seeds):
    """With many schedules, also at every moment at which a late copy might run: 6,115 of them for the largest."""
    tried = explore(copy_of(*COPIES[name]), pruned=len(schedule_seeds) < 1000)
    assert tried > 1 or name == "pageable", "nothing was left in flight"


def test_two_copies_in_turn():
    assert explore(copy_of(staged, 6, torch.bfloat16, copies=2)) > 20
    assert explore(copy_of(in_chunks, 6, torch.bfloat16, copies=2)) > 20


def asked_until_done(accelerator):
    with in_chunks(accelerator) as transfer:
        source = accelerator.pin_empty(8, dtype=torch.float32)
        source.copy_(values := random_bits(8, seed=1))
        destination = accelerator.device_empty(8, dtype=torch.bfloat16)
        copy = transfer.submit(destination, source)
        while not copy.done:
            pass
        assert torch.equal(destination, values.bfloat16())
        source.fill_(7)
        assert torch.equal(destination, values.bfloat16())
        accelerator.unpin_memory(source)


def test_a_copy_that_is_asked_until_it_is_done():
    assert explore(asked_until_done) > 10


@pytest.fixture
def file(tmp_path):
    """Three chunks of 1024 fp32 values, and a rest."""
    values = random_bits(3 * 1024, seed=4)
    return swap_out(values, str(tmp_path), checksum_bytes=4096), values


def from_file(file, dtype=torch.bfloat16, copies=1, **options):
    def program(accelerator):
        swapped, values = file
        with NvmeSwappedTransfer(accelerator=accelerator, chunk_elements=1024, threads=1, **options) as transfer:
            submitted = []
            for _ in range(copies):
                destination = accelerator.device_empty(*values.shape, dtype=dtype)
                submitted.append((transfer.submit(destination, swapped), destination))
            for copy, destination in submitted:
                copy.wait()
                assert torch.equal(destination, values.to(dtype)), "wrong values"
        assert accelerator.pinned_bytes == 0

    return program


@pytest.mark.parametrize("cast", ["device", "host"])
@pytest.mark.parametrize("buffers", [1, 2])
def test_every_order_of_a_copy_from_a_file_gives_its_values(file, cast, buffers):
    assert explore(from_file(file, cast=cast, buffers=buffers)) > 1


def test_drawn_orders_of_copies_from_a_file(file, schedule_seeds):
    sample(from_file(file, copies=2, cast="device", buffers=2), schedule_seeds)
    sample(from_file(file, torch.float32, copies=2, cast="host", buffers=3), schedule_seeds)


def forgets(*_):
    """Takes the place of a method that waits."""


def waits_for_one_event(self):
    pending = self._pending
    if pending is not None:
        pending[0][0].synchronize()
        self._pending = None


def begin_without_order(self):
    self.settle()
    for slot in self._slots:
        slot.event = None


#: The wait that is forgotten, and a copy that needs it.
FORGOTTEN = {
    "a staging buffer is reused while a copy reads it": (StagingBuffer, "reclaim", forgets, "staged"),
    "the last chunk is not waited for": (EventCopy, "synchronize", forgets, "staged"),
    "one of two streams is waited for": (EventCopy, "synchronize", waits_for_one_event, "direct in chunks"),
    "the source is free at once": (EventCopy, "release_source", forgets, "direct in chunks"),
    "a mapped source is free at once": (EventCopy, "release_source", forgets, "direct mapped"),
}


@pytest.mark.parametrize("mistake", FORGOTTEN)
def test_a_forgotten_wait_is_found_and_one_copy_that_is_late_shows_it(mistake, monkeypatch):
    owner, method, wrong, name = FORGOTTEN[mistake]
    monkeypatch.setattr(owner, method, wrong)
    for find in (explore, lambda program: sample(program, range(50))):
        with pytest.raises(ScheduleError) as caught:
            find(copy_of(*COPIES[name]))
        (deviation,) = caught.value.schedule.deviations
        assert deviation[0] == "is held back"
        assert f"* copy {deviation[1]} is held back" in str(caught.value)


def test_a_device_that_forgets_the_callers_stream_is_found(monkeypatch):
    """A copy that the caller has queued to the same destination must not arrive last."""
    monkeypatch.setattr(ScratchRing, "begin", begin_without_order)

    def program(accelerator):
        with in_chunks(accelerator) as transfer:
            source = accelerator.pin_empty(8, dtype=torch.float32).fill_(1)
            old = accelerator.device_empty(8, dtype=torch.bfloat16).fill_(-1)
            destination = accelerator.device_empty(8, dtype=torch.bfloat16)
            accelerator.enqueue_copy(destination, old)
            transfer.copy(destination, source)
            accelerator.synchronize()
            assert destination.tolist() == [1] * 8, "wrong values"
            accelerator.unpin_memory(source)

    with pytest.raises(ScheduleError, match="in a race") as caught:
        explore(program)
    assert list(caught.value.schedule.deviations) == [("is held back", 1, 0)]


def test_a_file_that_is_read_into_memory_in_use_is_found(file, monkeypatch):
    monkeypatch.setattr(StagingBuffer, "reclaim", forgets)
    with pytest.raises(ScheduleError, match="wrong values") as caught:
        explore(from_file(file, cast="device", buffers=1))
    assert len(caught.value.schedule.deviations) == 1
