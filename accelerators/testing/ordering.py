"""Streams and events of an accelerator as tests: what runs where, and what a wait covers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ..protocol import Accelerator
from .tools import check_values, skip_without

#: Elements of a copy that takes a device long enough to be looked at while it runs.
_MANY = 2**20


class OrderingConformance:
    """The part of ``AcceleratorConformance`` about streams and events. Needs its fixture ``accelerator``."""

    @pytest.fixture
    def pinned(self, accelerator: Accelerator) -> Any:
        """Pinned memory that holds fives."""
        skip_without(accelerator, "events", "pins_host_memory")
        memory = accelerator.pin_empty(_MANY, dtype=torch.float32)
        yield memory.fill_(5)
        accelerator.synchronize()
        accelerator.unpin_memory(memory)

    def test_enqueue_copy_from_pinned_memory_does_not_block(self, accelerator: Accelerator, pinned: Tensor) -> None:
        skip_without(accelerator, "copies_asynchronously")
        destination = accelerator.device_empty(_MANY, dtype=torch.float32)
        for _ in range(5):  # a process that is held up in between may find them done
            for _ in range(8):
                accelerator.enqueue_copy(destination, pinned)
            event = _recorded(accelerator)
            if not (event.query() or event.query()):
                return
            accelerator.synchronize()
        pytest.fail("copies from pinned memory were over each time that they had been queued")

    def test_query_tells_the_truth(self, accelerator: Accelerator, pinned: Tensor) -> None:
        destination = accelerator.device_empty(_MANY, dtype=torch.float32)
        accelerator.enqueue_copy(destination, pinned)
        event, until = _recorded(accelerator), time.monotonic() + 30
        while not event.query():
            assert time.monotonic() < until, "an event was not done for 30 seconds"
        check_values(destination, pinned, "once the event was done")

    def test_copies_run_on_the_current_stream(self, accelerator: Accelerator, pinned: Tensor) -> None:
        skip_without(accelerator, "streams")
        destination = accelerator.device_empty(_MANY, dtype=torch.float32)
        accelerator.synchronize()
        side = _make(accelerator.Stream)
        with accelerator.stream(side):
            accelerator.enqueue_copy(destination, pinned)
        side.synchronize()
        check_values(destination, pinned, "once the stream was waited for")

    def test_an_event_marks_the_current_stream(self, accelerator: Accelerator, pinned: Tensor) -> None:
        skip_without(accelerator, "streams")
        destination = accelerator.device_empty(_MANY, dtype=torch.float32)
        accelerator.synchronize()
        with accelerator.stream(_make(accelerator.Stream)):
            accelerator.enqueue_copy(destination, pinned)
            event = _recorded(accelerator)
        event.synchronize()
        check_values(destination, pinned, "once the event was waited for")

    def test_synchronize_waits_for_every_stream(self, accelerator: Accelerator, pinned: Tensor) -> None:
        skip_without(accelerator, "streams")
        destinations = [accelerator.device_empty(_MANY, dtype=torch.float32) for _ in range(2)]
        accelerator.synchronize()
        for destination in destinations:
            with accelerator.stream(_make(accelerator.Stream)):
                accelerator.enqueue_copy(destination, pinned)
        accelerator.synchronize()
        for destination in destinations:
            check_values(destination, pinned, "once the device was waited for")

    def test_the_current_stream_is_the_threads_own(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "streams")
        side, seen = _make(accelerator.Stream), []
        with accelerator.stream(side):
            thread = threading.Thread(target=lambda: seen.append(accelerator.current_stream()))
            thread.start()
            thread.join()
        assert seen != [side], "another thread's current stream"

    def test_the_current_stream_of_the_device_is_the_one_in_use(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "streams")
        side = _make(accelerator.Stream)
        with accelerator.stream(side):
            index = accelerator.device_empty(1, dtype=torch.float32).device.index or 0
            assert accelerator.current_stream(index) == side

    def test_stream_context_is_left_after_an_error(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "streams")
        before = accelerator.current_stream()
        with pytest.raises(ZeroDivisionError), accelerator.stream(_make(accelerator.Stream)):
            raise ZeroDivisionError
        assert accelerator.current_stream() == before

    def test_an_event_covers_the_copies_before_it(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "events", "pins_host_memory")
        pinned = accelerator.pin_empty(100_000, dtype=torch.float32)
        pinned.fill_(7)
        destination = accelerator.device_empty(100_000, dtype=torch.float32)
        with accelerator.stream(accelerator.current_stream()):
            accelerator.enqueue_copy(destination, pinned)
            event = _make(accelerator.Event)
            event.record()
        event.synchronize()
        assert event.query()
        check_values(destination, torch.full((100_000,), 7.0), "after the event")
        accelerator.unpin_memory(pinned)

    def test_a_stream_waits_for_an_event_of_another(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "streams", "events", "pins_host_memory")
        pinned = accelerator.pin_empty(100_000, dtype=torch.float32)
        pinned.fill_(5)
        first, second = (accelerator.device_empty(100_000, dtype=torch.float32) for _ in range(2))
        accelerator.synchronize()
        producer, consumer = _make(accelerator.Stream), _make(accelerator.Stream)
        with accelerator.stream(producer):
            accelerator.enqueue_copy(first, pinned)
            event = _make(accelerator.Event)
            event.record()
        consumer.wait_event(event)
        with accelerator.stream(consumer):
            accelerator.enqueue_copy(second, first)
        consumer.synchronize()
        check_values(second, torch.full((100_000,), 5.0), "on the stream that waits for the event")
        accelerator.synchronize()
        accelerator.unpin_memory(pinned)

    def test_stream_context_is_current_and_restored(self, accelerator: Accelerator) -> None:
        skip_without(accelerator, "streams")
        before = accelerator.current_stream()
        stream = _make(accelerator.Stream)
        with accelerator.stream(stream):
            assert accelerator.current_stream() == stream
        assert accelerator.current_stream() == before

    def test_stream_context_takes_none(self, accelerator: Accelerator) -> None:
        before = accelerator.current_stream()
        with accelerator.stream(None):
            assert accelerator.current_stream() == before


def _recorded(accelerator: Accelerator) -> Any:
    """An event behind what is queued on the current stream."""
    event = _make(accelerator.Event)
    event.record()
    return event


def _make(factory: Callable[[], Any] | None) -> Any:
    assert factory is not None
    return factory()
