"""Strategies that only the tests of ``h2d bench`` register."""

from transfer import HostToDeviceTransfer, InFlightCopy, StrategyUnavailableError


class Blocking(HostToDeviceTransfer):
    """The right copy, to be spoilt by subclasses."""

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        self.accelerator.synchronize()
        return InFlightCopy()


class WrongInOneBit(Blocking):
    """Leaves the wrong sign at the last element."""

    def _submit(self, destination, source):
        copy = super()._submit(destination, source)
        destination[-1:].neg_()
        return copy


class CopiesNothing(HostToDeviceTransfer):
    def _submit(self, destination, source):
        return InFlightCopy()


class WrongAtLast(Blocking):
    """Right until it has copied twice: a first copy alone does not show it."""

    copies = 0

    def _submit(self, destination, source):
        self.copies += 1
        if self.copies > 2:
            return InFlightCopy()
        return super()._submit(destination, source)


class Refuses(HostToDeviceTransfer):
    def _submit(self, destination, source):
        raise StrategyUnavailableError("not on this machine")


class PageLocks(Blocking):
    """Page-locks in place what it is to copy from, unless that is page-locked already."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._locked = []

    def prepare(self, source):
        if not self.accelerator.is_pinned(source):
            self.accelerator.register_host_memory(source.data_ptr(), source.nbytes)
            self._locked.append(source)

    def close(self):
        while self._locked:
            self.accelerator.unregister_host_memory(self._locked.pop().data_ptr())
