"""Strategies with one mistake each, and a sound one; run by ``test_broken_strategies.py``, which reads what fails."""

import torch

from accelerators.simulated import SimulatedAccelerator
from transfer import HostToDeviceTransfer, InFlightCopy
from transfer.in_flight import FINISHED, EventCopy
from transfer.testing import TransferConformance


class Sound(HostToDeviceTransfer):
    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        self.accelerator.synchronize()
        return FINISHED


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


class ReleasesTheSourceTooEarly(HostToDeviceTransfer):
    """The device still reads the pinned source when ``release_source`` returns."""

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        event = self.accelerator.Event()
        event.record()
        return EventCopy(event, destination)


class ForgetsTheCurrentStream(HostToDeviceTransfer):
    """Copies on a stream of its own, and orders nothing before it."""

    def _submit(self, destination, source):
        accelerator = self.accelerator
        side = accelerator.Stream()
        with accelerator.stream(side):
            accelerator.enqueue_copy(destination, source)
        side.synchronize()
        return FINISHED


class OrdersByBlockingTheHost(HostToDeviceTransfer):
    """``order_after`` waits where it should only order."""

    class Copy(EventCopy):
        def order_after(self, stream):
            self.wait()

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        event = self.accelerator.Event()
        event.record()
        return self.Copy(event, destination, source)


class TestSound(TransferConformance):
    strategy = Sound

    def make_accelerator(self, config):
        return SimulatedAccelerator(seed=3)

    def make_transfer(self, accelerator):
        return self.strategy(accelerator=accelerator)


class TestForgetsToWait(TestSound):
    strategy = ForgetsToWait


class TestOneElementIsWrong(TestSound):
    strategy = OneElementIsWrong


class TestIgnoresStrides(TestSound):
    strategy = IgnoresStrides


class TestWritesTheNextElement(TestSound):
    strategy = WritesTheNextElement


class TestLeaksPinnedMemory(TestSound):
    strategy = LeaksPinnedMemory


class TestReusesABufferTooEarly(TestSound):
    strategy = ReusesABufferTooEarly


class TestKeepsCopyingAfterAnError(TestSound):
    strategy = KeepsCopyingAfterAnError


class TestSwallowsErrors(TestSound):
    strategy = SwallowsErrors


class TestReleasesTheSourceTooEarly(TestSound):
    strategy = ReleasesTheSourceTooEarly


class TestForgetsTheCurrentStream(TestSound):
    strategy = ForgetsTheCurrentStream


class TestOrdersByBlockingTheHost(TestSound):
    strategy = OrdersByBlockingTheHost
