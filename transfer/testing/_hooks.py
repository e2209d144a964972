"""What a subclass of the conformance suite gives, and the values the tests use."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.testing import accelerator_or_skip

from ..errors import FallbackWarning
from ..interface import HostToDeviceTransfer

#: What destinations hold before a copy, to see where it wrote.
GUARD = -77.0


def from_bits(patterns: list[int]) -> Tensor:
    """fp32 values with exactly these bits."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def random_bits(numel: int, seed: int) -> Tensor:
    """fp32 values with random bits: every exponent, subnormals, infinities; NaNs are made finite.

    NaN payloads are free by contract, so they are tested on their own.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = values.view(torch.float32)
    return torch.where(values.isnan(), torch.full_like(values, 0.1), values)


class Hooks:
    """What every part of the suite is built on; see ``TransferConformance``."""

    accelerator_name: str = ""

    def make_accelerator(self, config: pytest.Config) -> Accelerator:
        return accelerator_or_skip(self.accelerator_name, config)

    def make_transfer(self, accelerator: Accelerator) -> HostToDeviceTransfer:  # noqa: ARG002 - for subclasses
        raise AssertionError("a subclass makes the strategy under test here")

    @pytest.fixture
    def accelerator(self, pytestconfig: pytest.Config) -> Accelerator:
        return self.make_accelerator(pytestconfig)

    @pytest.fixture(autouse=True)
    def _no_stand_in(self, accelerator: Accelerator) -> None:
        """A strategy that gives up where it could run would pass as ``pageable``: that is an error."""
        lacks = accelerator.capabilities.why_not("events", "pins_host_memory") is not None
        # pytest takes this back at the end of each test.
        warnings.filterwarnings("ignore" if lacks else "error", category=FallbackWarning)

    @pytest.fixture
    def transfer(self, accelerator: Accelerator) -> Iterator[HostToDeviceTransfer]:
        transfer = self.make_transfer(accelerator)
        yield transfer
        transfer.close()
        assert transfer.pinned_bytes == 0
