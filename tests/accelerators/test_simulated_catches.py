"""The simulated accelerator turns every missing wait into wrong values, on every run and every seed."""

import functools

import pytest
import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.simulated import late_queue as _late_queue

#: Of SEEDS, so that one that fails says how many of them do.
SEEDS = range(5)


def seeds_where(holds):
    """The seeds with which a function of the seed is true."""
    return [seed for seed in SEEDS if holds(seed)]


def staging_loop(accelerator, destination, source, chunk, *, mistake=None):
    """The textbook loop over two pinned buffers, with one mistake on request."""
    buffers = [accelerator.pin_empty(chunk, dtype=destination.dtype) for _ in range(2)]
    guards = {}
    other = accelerator.Stream()
    event = None
    for index, offset in enumerate(range(0, source.numel(), chunk)):
        slot = index % 2
        if slot in guards and mistake != "no reuse wait":
            guards[slot].synchronize()
        piece = source[offset : offset + chunk]
        buffers[slot][: piece.numel()].copy_(piece)
        event = accelerator.Event()
        if mistake == "event recorded too early":
            event.record()
        accelerator.enqueue_copy(destination[offset : offset + chunk], buffers[slot][: piece.numel()])
        if mistake == "event on the wrong stream":
            event.record(other)
        elif mistake != "event recorded too early":
            event.record()
        guards[slot] = event
    if mistake != "no final wait":
        event.synchronize()
    return destination.clone()


def staged(seed, chunk, mistake=None):
    accelerator = SimulatedAccelerator(seed)
    destination = accelerator.device_empty(10, dtype=torch.bfloat16)
    return staging_loop(accelerator, destination, torch.arange(10.0), chunk, mistake=mistake).tolist()


@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_the_right_loop_is_right(chunk):
    assert seeds_where(lambda seed: staged(seed, chunk) != list(range(10))) == []


@pytest.mark.parametrize(
    "mistake", ["no reuse wait", "no final wait", "event on the wrong stream", "event recorded too early"]
)
@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
def test_each_mistake_gives_wrong_values_every_time(mistake, chunk):
    assert seeds_where(lambda seed: staged(seed, chunk, mistake) == list(range(10))) == []


def test_what_exactly_goes_wrong():
    """Chunks 0-2, 3-5, 6-8, 9 in two buffers: worked out by hand."""
    destination = (accelerator := SimulatedAccelerator()).device_empty(10, dtype=torch.bfloat16)
    got = staging_loop(accelerator, destination, torch.arange(10.0), 3, mistake="no reuse wait")
    # The first copy reads its buffer after chunk 6-8 was cast into it, the second after 9 was.
    assert got.tolist() == [6, 7, 8, 9, 4, 5, 6, 7, 8, 9]

    destination = (accelerator := SimulatedAccelerator()).device_empty(10, dtype=torch.bfloat16)
    destination.fill_(-1)
    got = staging_loop(accelerator, destination, torch.arange(10.0), 3, mistake="no final wait")
    # Only the two copies whose buffers were needed again have happened.
    assert got.tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1, -1]


def scratch_ring(accelerator, jobs, *, guards_belong_to_the_buffer):
    """Copies each job through two device scratch buffers on one stream, casting on another.

    The cast of a chunk must be done before the same scratch is written again. Keeping the events of the
    casts for each job, not for each buffer, forgets that for the first chunks of the next job.
    """
    incoming, casting = accelerator.Stream(), accelerator.Stream()
    chunk = jobs[0][1].numel() // 4
    scratch = [accelerator.device_empty(chunk, dtype=torch.float32) for _ in range(2)]
    guards = {}
    for destination, source in jobs:
        if not guards_belong_to_the_buffer:
            guards = {}
        for index in range(4):
            slot = index % 2
            if slot in guards:
                incoming.wait_event(guards[slot])
            piece = slice(index * chunk, (index + 1) * chunk)
            with accelerator.stream(incoming):
                accelerator.enqueue_copy(scratch[slot], source[piece])
                arrived = accelerator.Event()
                arrived.record()
            casting.wait_event(arrived)
            with accelerator.stream(casting):
                accelerator.enqueue_copy(destination[piece], scratch[slot])
                guards[slot] = accelerator.Event()
                guards[slot].record()
    casting.synchronize()


def scratch_result(seed, *, guards_belong_to_the_buffer):
    accelerator = SimulatedAccelerator(seed)
    jobs = []
    for value in range(12):
        source = accelerator.pin_empty(8, dtype=torch.float32)
        source.copy_(torch.arange(8.0) + 8 * value)
        jobs.append((accelerator.device_empty(8, dtype=torch.bfloat16), source))
    scratch_ring(accelerator, jobs, guards_belong_to_the_buffer=guards_belong_to_the_buffer)
    return torch.stack([destination for destination, _ in jobs]).flatten().tolist()


def test_guards_that_belong_to_the_call_are_caught():
    assert seeds_where(lambda seed: scratch_result(seed, guards_belong_to_the_buffer=True) != list(range(96))) == []
    assert seeds_where(lambda seed: scratch_result(seed, guards_belong_to_the_buffer=False) == list(range(96))) == []


def chain(accelerator, *, ordered):
    """Copies on one stream what another stream brings; returns what arrived, and the streams."""
    pinned = accelerator.pin_empty(4, dtype=torch.float32)
    pinned.fill_(1)
    first, second = (accelerator.device_empty(4, dtype=torch.float32) for _ in range(2))
    producer, consumer = accelerator.Stream(), accelerator.Stream()
    with accelerator.stream(producer):
        accelerator.enqueue_copy(first, pinned)
    if ordered:
        consumer.wait_stream(producer)
    with accelerator.stream(consumer):
        accelerator.enqueue_copy(second, first)
    return second, producer, consumer


ENDINGS = {
    "consumer": lambda accelerator, producer, consumer: consumer.synchronize(),
    "producer first": lambda accelerator, producer, consumer: (producer.synchronize(), consumer.synchronize()),
    "device": lambda accelerator, producer, consumer: accelerator.synchronize(),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_stream_that_does_not_wait_for_another_is_caught_whatever_the_host_waits_for(seed, ending):
    for ordered in (True, False):
        accelerator = SimulatedAccelerator(seed)
        second, producer, consumer = chain(accelerator, ordered=ordered)
        ENDINGS[ending](accelerator, producer, consumer)
        assert torch.equal(second, torch.ones(4)) == ordered


@pytest.mark.parametrize("seed", SEEDS)
def test_two_streams_that_write_the_same_memory_are_caught(seed):
    accelerator = SimulatedAccelerator(seed)
    destination = accelerator.device_empty(4, dtype=torch.float32)
    for value in (1, 2):
        pinned = accelerator.pin_empty(4, dtype=torch.float32)
        pinned.fill_(value)
        with accelerator.stream(accelerator.Stream()):
            accelerator.enqueue_copy(destination, pinned)
    accelerator.synchronize()
    assert destination.isnan().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_blocking_copy_that_another_stream_still_reads_is_caught(seed):
    accelerator = SimulatedAccelerator(seed)
    first, second = (accelerator.device_empty(4, dtype=torch.float32) for _ in range(2))
    first.fill_(1)
    with accelerator.stream(side := accelerator.Stream()):
        accelerator.enqueue_copy(second, first)
    accelerator.enqueue_copy(first, torch.full((4,), 2.0))
    side.synchronize()
    assert second.isnan().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_asking_whether_work_is_done_orders_nothing(seed):
    accelerator = SimulatedAccelerator(seed)
    second, _, consumer = chain(accelerator, ordered=True)
    third = accelerator.device_empty(4, dtype=torch.float32)
    assert not consumer.query()
    with accelerator.stream(accelerator.Stream()):
        accelerator.enqueue_copy(third, second)
    accelerator.synchronize()
    assert third.isnan().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_views_that_interleave_without_sharing_elements_are_no_race(seed):
    accelerator = SimulatedAccelerator(seed)
    grid, line = accelerator.device_empty(4, 4, dtype=torch.float32), accelerator.device_empty(8, dtype=torch.float32)
    for parts in ((grid[:, :2], grid[:, 2:]), (line[::2], line[1::2])):
        for value, part in enumerate(parts):
            pinned = accelerator.pin_empty(*part.shape, dtype=torch.float32)
            pinned.fill_(value)
            with accelerator.stream(accelerator.Stream()):
                accelerator.enqueue_copy(part, pinned)
        accelerator.synchronize()
        for value, part in enumerate(parts):
            assert (part == value).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int32, torch.uint8, torch.bool]
)
def test_poison_is_never_the_value(dtype):
    accelerator = SimulatedAccelerator()
    for value in (0, 1):
        pinned = accelerator.pin_empty(4, dtype=dtype)
        pinned.copy_(torch.full((4,), value))
        first, second = (accelerator.device_empty(4, dtype=dtype) for _ in range(2))
        with accelerator.stream(accelerator.Stream()):
            accelerator.enqueue_copy(first, pinned)
        with accelerator.stream(accelerator.Stream()):
            accelerator.enqueue_copy(second, first)
        accelerator.synchronize()
        assert (second.float() != value).all()


def test_old_work_of_another_stream_overtakes_nothing_it_was_ordered_before():
    accelerator = SimulatedAccelerator()
    old, new = (accelerator.pin_empty(4, dtype=torch.float32) for _ in range(2))
    old.fill_(1)
    new.fill_(2)
    destination = accelerator.device_empty(4, dtype=torch.float32)
    accelerator.enqueue_copy(destination, old)
    side = accelerator.Stream()
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        accelerator.enqueue_copy(destination, new)
    side.synchronize()
    accelerator.synchronize()
    assert destination.tolist() == [2, 2, 2, 2]


def order_of_copies(seed, monkeypatch):
    """In which order four copies on each of three independent streams run."""
    simulated = SimulatedAccelerator(seed)
    ran = []
    monkeypatch.setattr(
        _late_queue, "delivery", lambda destination, source, poisoned: functools.partial(ran.append, int(source))
    )
    for value in range(12):
        source = simulated.pin_empty(1, dtype=torch.float32)
        source.fill_(value)
        if value % 4 == 0:
            stream = simulated.Stream()
        with simulated.stream(stream):
            simulated.enqueue_copy(simulated.device_empty(1, dtype=torch.float32), source)
    simulated.synchronize()
    return ran


def test_the_seed_draws_the_order_and_streams_keep_theirs(monkeypatch):
    orders = [order_of_copies(seed, monkeypatch) for seed in range(40)]
    assert orders == [order_of_copies(seed, monkeypatch) for seed in range(40)]
    assert len({tuple(order) for order in orders}) > 10
    for order in orders:
        for stream in range(3):
            assert [value for value in order if value // 4 == stream] == [4 * stream + i for i in range(4)]
