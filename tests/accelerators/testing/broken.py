"""Accelerators with one mistake each, and a sound one. ``test_broken_accelerators.py`` reads what fails."""

import contextlib
import dataclasses

import torch

from accelerators.simulated import SimulatedAccelerator
from accelerators.simulated.late_queue import SimulatedEvent, SimulatedStream
from accelerators.testing import AcceleratorConformance


class Sound(SimulatedAccelerator):
    pass


class EventsEndTooEarly(Sound):
    """``Event.synchronize`` returns before the marked work is done."""

    class Event(SimulatedEvent):
        def synchronize(self):
            pass

        def query(self):
            return True

    def __init__(self):
        super().__init__()
        self.Event = lambda: type(self).Event(self._queue)


class SynchronizedEventsAreNotDone(Sound):
    """``Event.query`` never says that the work is done."""

    class Event(SimulatedEvent):
        def query(self):
            return False

    def __init__(self):
        super().__init__()
        self.Event = lambda: type(self).Event(self._queue)


class QueryIsAlwaysTrue(Sound):
    class Event(SimulatedEvent):
        def query(self):
            return True

    def __init__(self):
        super().__init__()
        self.Event = lambda: type(self).Event(self._queue)


class EventsMarkTheDefaultStream(Sound):
    class Event(SimulatedEvent):
        def record(self, stream=None):
            super().record(self._queue.default_stream)

    def __init__(self):
        super().__init__()
        self.Event = lambda: type(self).Event(self._queue)


class StreamsWaitForNoEvent(Sound):
    class Stream(SimulatedStream):
        def wait_event(self, event):
            pass

    def __init__(self):
        super().__init__()
        self.Stream = lambda: type(self).Stream(self._queue)


class EverythingIsPinned(Sound):
    def is_pinned(self, tensor):
        return True


class NothingIsPinned(Sound):
    def is_pinned(self, tensor):
        return False


class IgnoresTheStream(Sound):
    def stream(self, stream):
        return contextlib.nullcontext()


class CopiesOnTheDefaultStream(Sound):
    """The context changes what ``current_stream`` says, and copies go elsewhere."""

    def enqueue_copy(self, destination, source):
        with self._queue.use(self._queue.default_stream):
            super().enqueue_copy(destination, source)


class StaysInTheStreamAfterAnError(Sound):
    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self._queue._current.stream = stream or before
        yield
        self._queue._current.stream = before


class NeverLeavesTheStream(Sound):
    @contextlib.contextmanager
    def stream(self, stream):
        self._queue._current.stream = stream or self.current_stream()
        yield


class OneCurrentStreamForAllThreads(Sound):
    def __init__(self):
        super().__init__()
        self._queue._current = type("Namespace", (), {})()


class CurrentStreamOfAnotherDevice(Sound):
    def current_stream(self, device_index=None):
        return super().current_stream() if device_index is None else self._queue.default_stream


class QueuedCopiesBlock(Sound):
    def enqueue_copy(self, destination, source):
        super().enqueue_copy(destination, source)
        self.synchronize()


class QueuedCopiesNeverRun(Sound):
    def enqueue_copy(self, destination, source):
        pass


class BlockingCopiesDoNotBlock(Sound):
    """Pageable memory, and what is cast, are read when the caller may have changed them."""

    def enqueue_copy(self, destination, source):
        self._queue.enqueue(self.current_stream(), destination.detach(), source.detach())


class CastsByTruncation(Sound):
    def enqueue_copy(self, destination, source):
        if destination.dtype == torch.bfloat16 and source.dtype == torch.float32:
            bits = source.contiguous().view(torch.int32) & -65536
            source = bits.view(torch.float32)
        super().enqueue_copy(destination, source)


class WritesPastTheEnd(Sound):
    def enqueue_copy(self, destination, source):
        super().enqueue_copy(destination, source)
        self.synchronize()
        behind = destination.storage_offset() + destination.numel()
        if destination.is_contiguous() and behind < destination.untyped_storage().nbytes() // destination.itemsize:
            destination.as_strided((1,), (1,), behind).zero_()


class RegisteringDoesNothing(Sound):
    def register_host_memory(self, address, num_bytes):
        return True

    def unregister_host_memory(self, address):
        pass


class UnregisteringDoesNothing(Sound):
    def unregister_host_memory(self, address):
        pass


class RegistersTheSameMemoryTwice(Sound):
    def register_host_memory(self, address, num_bytes):
        with contextlib.suppress(RuntimeError):
            super().register_host_memory(address, num_bytes)
        return True


class SynchronizeDoesNothing(Sound):
    def synchronize(self, device_index=None):
        pass


class SynchronizeWaitsForTheCurrentStream(Sound):
    def synchronize(self, device_index=None):
        self.current_stream().synchronize()


class PinsNothing(Sound):
    def pin_empty(self, *size, dtype, device="cpu"):
        return torch.empty(*size, dtype=dtype)


class DeviceMemoryIsHostMemory(Sound):
    def device_empty(self, *size, dtype):
        return torch.empty(*size, dtype=dtype)


class PromisesEventsThatItLacks(Sound):
    def __init__(self):
        super().__init__(events=False)

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, events=True)


class LacksAReason(Sound):
    def __init__(self):
        super().__init__(events=False)

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, reasons={"events": "no"})


class TestSound(AcceleratorConformance):
    accelerator_name = "simulated"
    kind = Sound

    def make_accelerator(self, config):
        return self.kind()


for kind in Sound.__subclasses__():
    globals()[f"Test{kind.__name__}"] = type(f"Test{kind.__name__}", (TestSound,), {"kind": kind})
