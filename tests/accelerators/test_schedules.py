"""``explore`` and ``sample`` run every order that streams allow, and report the simplest one that fails."""

import functools

import pytest
import torch

from accelerators.simulated import ScheduleError, SimulatedAccelerator, explore, sample
from accelerators.simulated import late_queue as _late_queue


def pinned(accelerator, value, numel=3):
    return accelerator.pin_empty(numel, dtype=torch.float32).fill_(value)


def test_every_order_that_three_streams_of_two_copies_allow_is_run(monkeypatch):
    orders = set()

    def program(accelerator):
        ran = []
        monkeypatch.setattr(_late_queue, "delivery", lambda _, source, **__: functools.partial(ran.append, int(source)))
        for stream in range(3):
            with accelerator.stream(accelerator.Stream()):
                for copy in range(2):
                    source = pinned(accelerator, 2 * stream + copy, 1)
                    accelerator.enqueue_copy(accelerator.device_empty(1, dtype=torch.float32), source)
        accelerator.synchronize()
        orders.add(tuple(ran))

    explore(program)
    assert len(orders) == 90  # 6! / 2!^3
    for order in orders:
        assert all(order.index(2 * stream) < order.index(2 * stream + 1) for stream in range(3))


def test_a_copy_runs_before_and_after_whatever_the_host_writes():
    seen = set()

    def program(accelerator):
        source, destination = pinned(accelerator, 0, 1), accelerator.device_empty(1, dtype=torch.float32)
        accelerator.enqueue_copy(destination, source)
        for value in (1, 2):
            source.fill_(value)
            accelerator.enqueue_copy(accelerator.device_empty(1, dtype=torch.float32), source)
        source.fill_(3)
        accelerator.synchronize()
        seen.add(destination.item())

    explore(program)
    assert seen == {0, 1, 2, 3}
    before, seen = seen, set()
    explore(program, pruned=False)
    assert seen == before


def test_a_right_program_is_right_under_each_and_their_number_is_returned():
    def program(accelerator):
        destination = accelerator.device_empty(3, dtype=torch.float32)
        accelerator.enqueue_copy(destination, pinned(accelerator, 1))
        event = accelerator.Event()
        event.record()
        event.synchronize()
        assert destination.tolist() == [1, 1, 1]

    assert explore(program) == 2  # at once, or when the host waits
    assert sample(program, range(7)) == 7


def two_copies(accelerator):
    """The second one is not waited for."""
    destinations = [accelerator.device_empty(3, dtype=torch.bfloat16) for _ in range(2)]
    for value, destination in enumerate(destinations):
        source = accelerator.pin_empty(3, dtype=torch.bfloat16)
        source.fill_(value)
        accelerator.enqueue_copy(destination, source)
        if value == 0:
            accelerator.synchronize()
    assert destinations[1].tolist() == [1, 1, 1], "not waited for"


@pytest.mark.parametrize("find", [explore, lambda program: sample(program, range(100))], ids=["explore", "sample"])
def test_the_simplest_failing_schedule_is_printed(find):
    with pytest.raises(ScheduleError) as caught:
        find(two_copies)
    first, title, *lines = str(caught.value).splitlines()
    assert first == "AssertionError: not waited for"
    assert title.endswith("has 1 deviation from first-in first-out order:")
    ran, deviation, late = lines
    assert ran.startswith("  copy 1, stream 0: reads pinned 1[")
    assert ran.endswith("], writes device 2[0:6]")
    assert deviation == "  * copy 2 is held back"
    assert late.startswith("  copy 2, stream 0: reads pinned 3[")
    assert late.endswith("], writes device 4[0:6], has not run")


def needs_two(accelerator):
    """Fails only where both of its copies are late; others have nothing to do with it."""
    for _ in range(3):
        accelerator.enqueue_copy(accelerator.device_empty(1, dtype=torch.float32), pinned(accelerator, 0, 1))
    accelerator.synchronize()
    destinations = [accelerator.device_empty(1, dtype=torch.float32).fill_(-1) for _ in range(2)]
    for destination in destinations:
        with accelerator.stream(accelerator.Stream()):
            accelerator.enqueue_copy(destination, pinned(accelerator, 1, 1))
    assert [destination.item() for destination in destinations] != [-1, -1]


@pytest.mark.parametrize("find", [explore, lambda program: sample(program, range(100))], ids=["explore", "sample"])
def test_as_many_deviations_as_it_takes(find):
    with pytest.raises(ScheduleError) as caught:
        find(needs_two)
    assert sorted(caught.value.schedule.deviations) == [("is held back", 4, 0), ("is held back", 5, 0)]


def test_a_race_is_found_though_first_in_first_out_order_hides_it():
    def program(accelerator):
        first, second = (accelerator.device_empty(3, dtype=torch.float32) for _ in range(2))
        with accelerator.stream(accelerator.Stream()):
            accelerator.enqueue_copy(first, pinned(accelerator, 1))
        with accelerator.stream(accelerator.Stream()):
            accelerator.enqueue_copy(second, first)
        accelerator.synchronize()
        assert second.tolist() == [1, 1, 1]

    with pytest.raises(ScheduleError, match="in a race") as caught:
        explore(program)
    assert len(caught.value.schedule.deviations) == 1


def test_a_source_that_is_submitted_before_it_has_its_values_fails_in_first_in_first_out_order():
    def program(accelerator):
        source, destination = pinned(accelerator, 0), accelerator.device_empty(3, dtype=torch.float32)
        accelerator.enqueue_copy(destination, source)
        source.fill_(1)
        accelerator.synchronize()
        assert destination.tolist() == [1, 1, 1]

    with pytest.raises(ScheduleError, match="has 0 deviations"):
        explore(program)


def test_asking_an_event_may_or_may_not_find_it_done():
    answers = set()

    def program(accelerator):
        accelerator.enqueue_copy(accelerator.device_empty(3, dtype=torch.float32), pinned(accelerator, 1))
        event = accelerator.Event()
        event.record()
        first = event.query()
        answers.add((first, event.query()))
        while not event.query():
            pass

    explore(program)
    assert answers == {(True, True), (False, True), (False, False)}


def test_a_program_that_does_not_repeat_itself_is_an_error():
    runs = []

    def program(accelerator):
        runs.append(None)
        if len(runs) == 1:
            two_copies(SimulatedAccelerator(eager=True))
            accelerator.enqueue_copy(accelerator.device_empty(3, dtype=torch.float32), pinned(accelerator, 1))

    with pytest.raises(RuntimeError, match="does not repeat itself"):
        explore(program)


def test_too_many_schedules_are_an_error():
    def program(accelerator):
        for _ in range(6):
            accelerator.enqueue_copy(accelerator.device_empty(3, dtype=torch.float32), pinned(accelerator, 1))
            accelerator.synchronize()

    assert explore(program) == 2**6
    with pytest.raises(RuntimeError, match="more than 63 schedules"):
        explore(program, most=63)
