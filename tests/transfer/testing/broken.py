"""Strategies with one mistake each, and a sound one; run by ``test_broken_strategies.py``, which reads what fails."""

import threading
import time

import torch

from accelerators.simulated import SimulatedAccelerator
from transfer import HostToDeviceTransfer, InFlightCopy, StrategyUnavailableError
from transfer.in_flight import FINISHED, EventCopy
from transfer.testing import TransferConformance


class Sound(HostToDeviceTransfer):
    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        self.accelerator.synchronize()
        return FINISHED


class Recorded(HostToDeviceTransfer):
    """Queues the copy; ``Copy`` is what is made of the event behind it, and of the source that it reads."""

    Copy = EventCopy

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        event = self.accelerator.Event()
        event.record()
        return self.Copy(event, destination, source)


class ForgetsToWait(HostToDeviceTransfer):
    """Waits for sources on the device alone; a copy from pinned memory of the same dtype is still in flight."""

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        if self.accelerator.on_device(source):
            self.accelerator.synchronize()
        return InFlightCopy()


class OneElementIsWrong(Sound):
    def _submit(self, destination, source):
        source = source.clone()
        if source.numel() > 1000:
            source.view(-1)[1000] = 0.5
        return super()._submit(destination, source)


class IgnoresStrides(Sound):
    """Takes the destination for contiguous, and so writes between its elements, or behind them."""

    def _submit(self, destination, source):
        strides = torch.empty(destination.shape, device="meta").stride()
        room = destination.untyped_storage().nbytes() // destination.element_size() - destination.storage_offset()
        fits = destination.numel() <= room
        return super()._submit(destination.as_strided(destination.shape, strides) if fits else destination, source)


class WritesTheNextElement(Sound):
    """Rounds sizes up, as a vector store would."""

    def _submit(self, destination, source):
        super()._submit(destination, source)
        room = destination.untyped_storage().nbytes() // destination.element_size()
        behind = destination.storage_offset() + destination.numel()
        if destination.is_contiguous() and destination.numel() % 4 and behind < room:
            destination.as_strided((1,), (1,), behind).zero_()
        return FINISHED


class LeaksPinnedMemory(Sound):
    def _submit(self, destination, source):
        self.accelerator.pin_empty(64, dtype=torch.float32)
        return super()._submit(destination, source)


class ReusesABufferTooEarly(HostToDeviceTransfer):
    """Casts into one pinned buffer, which the copy before still reads."""

    def _submit(self, destination, source):
        accelerator = self.accelerator
        buffer = accelerator.pin_empty(256, dtype=destination.dtype)
        try:
            flat, values = destination.view(-1), source.reshape(-1)
            for begin in range(0, values.numel(), 256):
                piece = values[begin : begin + 256]
                accelerator.enqueue_copy(flat[begin : begin + 256], buffer[: piece.numel()].copy_(piece))
        finally:
            accelerator.synchronize()
            accelerator.unpin_memory(buffer)
        return FINISHED


class KeepsCopyingAfterAnError(HostToDeviceTransfer):
    """A part of it is still in flight when it raises."""

    def submit(self, destination, source):
        try:
            return super().submit(destination, source)
        except (RuntimeError, OSError) as error:
            late = self.accelerator.pin_empty(1, dtype=destination.dtype).fill_(destination.numel())
            self.accelerator.enqueue_copy(destination.reshape(-1)[:1], late)
            raise error

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        self.accelerator.synchronize()
        return FINISHED


class SwallowsErrors(Sound):
    def _submit(self, destination, source):
        try:
            return super()._submit(destination, source)
        except OSError:
            return FINISHED


class ReleasesTheSourceTooEarly(Recorded):
    """The device still reads the pinned source when ``release_source`` returns."""

    class Copy(EventCopy):
        def release_source(self):
            pass


class ForgetsTheCurrentStream(HostToDeviceTransfer):
    """Copies on a stream of its own, and orders nothing before it."""

    def _submit(self, destination, source):
        accelerator = self.accelerator
        side = accelerator.Stream()
        with accelerator.stream(side):
            accelerator.enqueue_copy(destination, source)
        side.synchronize()
        return FINISHED


class OrdersByBlockingTheHost(Recorded):
    """``order_after`` waits where it should only order."""

    class Copy(EventCopy):
        def order_after(self, stream):
            self.wait()


class ForgetsToWaitForPageLockedSources(HostToDeviceTransfer):
    """Waits for memory that was pinned when it was made, and not for what ``prepare`` page-locks in place."""

    def __init__(self, **options):
        super().__init__(**options)
        self.locked = {}

    @property
    def pinned_bytes(self):
        return sum(self.locked.values())

    def prepare(self, source):
        address, size = source.data_ptr(), source.nbytes
        self.accelerator.register_host_memory(address, size)
        self.locked[address] = size

    def close(self):
        if self._accelerator is not None:
            self._accelerator.synchronize()
        while self.locked:
            self.accelerator.unregister_host_memory(self.locked.popitem()[0])

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        if source.data_ptr() not in self.locked:
            self.accelerator.synchronize()
        return FINISHED


class WaitsForTheFirstEventOnly(HostToDeviceTransfer):
    """Two halves on two streams."""

    def _submit(self, destination, source):
        accelerator, events, streams = self.accelerator, [], [self.accelerator.Stream() for _ in range(2)]
        if destination.dim() != 1 or destination.numel() < 2:
            return Sound._submit(self, destination, source)
        before = accelerator.Event()
        before.record()
        for stream, target, values in zip(streams, destination.chunk(2), source.chunk(2), strict=True):
            stream.wait_event(before)
            with accelerator.stream(stream):
                accelerator.enqueue_copy(target, values)
                events.append(accelerator.Event())
                events[-1].record()
        return EventCopy(events[:1], destination, source)


class SaysDoneTooEarly(Recorded):
    class Copy(EventCopy):
        done = True


class NeverSaysDone(Recorded):
    class Copy(EventCopy):
        done = False


class CannotBeWaitedForAgain(Recorded):
    class Copy(EventCopy):
        def wait(self):
            if self._pending is None:
                raise RuntimeError("was waited for")
            super().wait()


class OrdersNothing(Recorded):
    """``order_after`` lets another stream run at once."""

    class Copy(EventCopy):
        def order_after(self, stream):
            pass


class CopiesWhenItIsWaitedFor(HostToDeviceTransfer):
    """Reads a source that the caller may have changed."""

    class Copy(InFlightCopy):
        done = False

        def __init__(self, work):
            self.work = work

        def wait(self):
            self.work()
            self.done = True

    def _submit(self, destination, source):
        return self.Copy(lambda: Sound._submit(self, destination, source))


class ForgetsTheCurrentStreamForPinnedSources(ForgetsTheCurrentStream):
    def _submit(self, destination, source):
        if self.accelerator.is_pinned(source) and source.dtype == destination.dtype:
            return super()._submit(destination, source)
        return Sound._submit(self, destination, source)


class CastsByTruncation(Sound):
    def _submit(self, destination, source):
        if destination.dtype == torch.bfloat16 and source.dtype == torch.float32:
            source = (source.contiguous().view(torch.int32) & -65536).view(torch.float32)
        return super()._submit(destination, source)


class FlushesSubnormals(Sound):
    def _submit(self, destination, source):
        least = torch.finfo(source.dtype).tiny if source.is_floating_point() else 0
        return super()._submit(destination, torch.where(source.abs() < least, source * 0, source))


class ChangesTheSource(Sound):
    """Uses it as scratch once it is copied."""

    def _submit(self, destination, source):
        copy = super()._submit(destination, source)
        source.zero_()
        return copy


class KeepsABuffer(Sound):
    """Pins one buffer at its first copy, and never gives it back."""

    buffer = None

    def _submit(self, destination, source):
        if self.buffer is None:
            self.buffer = self.accelerator.pin_empty(64, dtype=torch.float32)
        return super()._submit(destination, source)


class PinsForEachSize(Sound):
    """Has a buffer for every size that it has seen."""

    def __init__(self, **options):
        super().__init__(**options)
        self.buffers = {}

    @property
    def pinned_bytes(self):
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def close(self):
        while self.buffers:
            self.accelerator.unpin_memory(self.buffers.popitem()[1])

    def _submit(self, destination, source):
        if source.numel() not in self.buffers:
            self.buffers[source.numel()] = self.accelerator.pin_empty(source.numel(), dtype=torch.float32)
        return super()._submit(destination, source)


class UnpinsABufferInFlight(HostToDeviceTransfer):
    """``close`` gives back what a copy still reads."""

    buffer = None

    @property
    def pinned_bytes(self):
        return 0 if self.buffer is None else self.buffer.nbytes

    def close(self):
        if self.buffer is not None:
            self.accelerator.unpin_memory(self.buffer)
            self.buffer = None

    def _submit(self, destination, source):
        self.accelerator.synchronize()
        self.close()
        self.buffer = self.accelerator.pin_empty(*destination.shape, dtype=destination.dtype)
        self.accelerator.enqueue_copy(destination, self.buffer.copy_(source))
        event = self.accelerator.Event()
        event.record()
        return EventCopy(event, destination)


class SharesABufferBetweenThreads(HostToDeviceTransfer):
    """Takes no lock around the buffer that it casts into."""

    buffer = None

    @property
    def pinned_bytes(self):
        return 0 if self.buffer is None else self.buffer.nbytes

    def close(self):
        if self.buffer is not None:
            self.accelerator.unpin_memory(self.buffer)
            self.buffer = None

    def _submit(self, destination, source):
        if self.buffer is None:
            self.buffer = self.accelerator.pin_empty(100_000, dtype=torch.float64)
        staged = self.buffer.view(destination.dtype)[: source.numel()].view(source.shape).copy_(source)
        time.sleep(1e-4)
        self.accelerator.enqueue_copy(destination, staged)
        self.accelerator.synchronize()
        return FINISHED


class SwallowsInterrupts(Sound):
    def _submit(self, destination, source):
        try:
            return super()._submit(destination, source)
        except KeyboardInterrupt:
            return FINISHED


class WritesWhenItFails(Sound):
    """Clears the destination before an error goes on."""

    def _submit(self, destination, source):
        try:
            return super()._submit(destination, source)
        except Exception:
            destination.zero_()
            raise


class HoldsItsLockAfterAnError(Sound):
    def __init__(self, **options):
        super().__init__(**options)
        self.lock = threading.Lock()

    def _submit(self, destination, source):
        if not self.lock.acquire(timeout=0.2):
            raise RuntimeError("the lock is held for ever")
        copy = super()._submit(destination, source)
        self.lock.release()
        return copy


class RefusesAfterWriting(Sound):
    """Says that it cannot make the copy, which it has made in part, and said nothing of before."""

    def _submit(self, destination, source):
        super()._submit(destination.reshape(-1)[:1], source.reshape(-1)[:1])
        raise StrategyUnavailableError("no")


class RemembersTheFirstValues(Sound):
    """Takes the same address for the same values."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = {}

    def _submit(self, destination, source):
        key = source.data_ptr(), source.shape, source.dtype
        return super()._submit(destination, self.seen.setdefault(key, source.clone()))


class RefusesNothing(Sound):
    def submit(self, destination, source):
        if isinstance(source, torch.Tensor) and source.numel() == destination.numel() and source.dtype.is_complex:
            source = source.real
        return super().submit(destination, source)


class TestSound(TransferConformance):
    strategy = Sound

    def make_accelerator(self, config):
        return SimulatedAccelerator(seed=3)

    def make_transfer(self, accelerator):
        return self.strategy(accelerator=accelerator)


for strategy in tuple(globals().values()):
    if isinstance(strategy, type) and issubclass(strategy, HostToDeviceTransfer) and strategy.__module__ == __name__:
        name = f"Test{strategy.__name__}"
        globals().setdefault(name, type(name, (TestSound,), {"strategy": strategy, "__module__": __name__}))
