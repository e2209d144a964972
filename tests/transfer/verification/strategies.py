"""Strategies that leave wrong values, for ``verify`` to find; registered by the fixture ``wrong``."""

import torch

from transfer import HostToDeviceTransfer, InFlightCopy
from transfer.nvme import swap_in

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(destination, indexes, bit=0):
    """Turns one bit of some elements around, in the memory of a simulated device, whatever the strides."""
    at = torch.unravel_index(torch.tensor(indexes, dtype=torch.int64), destination.shape)
    elements = destination[at].view(INTEGERS[destination.element_size()])
    destination[at] = (elements ^ (1 << bit)).view(destination.dtype)


class Flips(HostToDeviceTransfer):
    """Copies right, and then turns the lowest bit of the elements ``wrong`` around."""

    name = "flips"
    reads_swapped = True
    wrong = ()
    bit = 0

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source if isinstance(source, torch.Tensor) else swap_in(source))
        self.accelerator.synchronize()
        if self.wrong:
            flip(destination, self.wrong, self.bit)
        return InFlightCopy()


class ForgetsToWait(HostToDeviceTransfer):
    """Says that a copy is finished when it is queued."""

    name = "forgets"

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        return InFlightCopy()


class WritesNaNs(HostToDeviceTransfer):
    """Copies right but for the NaNs, which get another payload, or become ``instead``."""

    name = "nans"
    instead = None

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        self.accelerator.synchronize()
        nans = destination.isnan()
        if self.instead is not None:
            destination[nans] = self.instead
        else:
            destination.view(torch.int16)[nans] = 0x7FA5 if destination.dtype == torch.bfloat16 else 0x7E05
        return InFlightCopy()


class LosesSigns(HostToDeviceTransfer):
    """Copies right but for negative zeros."""

    name = "zeros"

    def _submit(self, destination, source):
        self.accelerator.enqueue_copy(destination, source)
        self.accelerator.synchronize()
        destination[destination == 0] = 0.0
        return InFlightCopy()
