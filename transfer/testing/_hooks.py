"""What subclasses of the conformance suite define, and the values that the tests use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.testing import accelerator_or_skip, bits, check_values, fetch, skip_without

from ..errors import FallbackWarning, StrategyUnavailableError
from ..interface import HostToDeviceTransfer

#: What destinations hold before a copy, to see where it wrote.
GUARD = -77.0

#: Host memory that a source may lie in: what torch allocates, the same after ``prepare``, what ``pin_empty`` returns.
KINDS = ("pageable", "prepared", "pinned")

#: With sources of fp32: one that is copied as it is, and one that is cast.
DTYPES = (torch.float32, torch.bfloat16)

#: Every kind of source, as it is and cast.
each_kind_of_source = pytest.mark.parametrize("kind", KINDS)
as_it_is_and_cast = pytest.mark.parametrize("dtype", DTYPES, ids=["as it is", "cast"])


def kinds_here(accelerator: Accelerator) -> list[str]:
    """Those of ``KINDS`` that this accelerator allows."""
    registers = accelerator.capabilities.registers_host_memory
    return [kind for kind in KINDS if kind != "prepared" or registers]


def described(kind: str, dtype: torch.dtype, source_dtype: torch.dtype = torch.float32) -> str:
    """What a failing check names: ``pinned source, float32 to bfloat16``."""
    return f"{kind} source, {source_dtype} to {dtype}".replace("torch.", "")


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


@contextmanager
def host_source(
    accelerator: Accelerator, transfer: HostToDeviceTransfer, values: Tensor, kind: str
) -> Iterator[Tensor]:
    """The values in host memory of one of ``KINDS``; at the end of the block, pinned memory is given back."""
    if kind == "prepared":
        skip_without(accelerator, "registers_host_memory")
    memory = accelerator.pin_empty(*values.shape, dtype=values.dtype) if kind == "pinned" else torch.empty_like(values)
    memory.copy_(values)
    if kind == "prepared":
        transfer.prepare(memory)
    del transfer  # which a test may drop while it uses the source
    yield memory
    accelerator.synchronize()
    if kind == "pinned":
        accelerator.unpin_memory(memory)


def read(accelerator: Accelerator, tensor: Tensor, what: str = "the destination") -> Tensor:
    """A host copy of what ``tensor`` holds now. ``copy`` has waited, so nothing may be written afterwards."""
    __tracebackhide__ = True
    now = tensor.detach().cpu().clone()
    later = fetch(accelerator, tensor)
    if not torch.equal(bits(later), bits(now)):
        check_values(now, later, f"{what}: written after copy had returned, when")
    return now


def check_copy(accelerator: Accelerator, destination: Tensor, expected: Tensor, what: str) -> None:
    """Fails, with one line, unless ``destination`` holds these bits now, without a wait."""
    __tracebackhide__ = True
    check_values(read(accelerator, destination, what), expected, what)


class Hooks:
    """What every part of the suite is built on; see ``TransferConformance``."""

    accelerator_name: str = ""

    #: Elements that need every buffer of the transfer more than once.
    several_chunks: int = 1103

    #: Why a subclass's strategy cannot serve an accelerator, or None; by the subclass and the accelerator's name.
    _refusals: ClassVar[dict[tuple[type, str], str | None]] = {}

    def make_accelerator(self, config: pytest.Config) -> Accelerator:
        return accelerator_or_skip(self.accelerator_name, config)

    def make_transfer(self, accelerator: Accelerator) -> HostToDeviceTransfer:  # noqa: ARG002 - for subclasses
        raise AssertionError("a subclass makes the strategy under test here")

    @pytest.fixture
    def accelerator(self, pytestconfig: pytest.Config) -> Accelerator:
        return self.make_accelerator(pytestconfig)

    @pytest.fixture(autouse=True)
    def _no_fallback(self, accelerator: Accelerator) -> None:
        """A strategy that falls back where it could copy would pass as ``pageable``: that is an error."""
        lacks = accelerator.capabilities.why_not("events", "pins_host_memory") is not None
        # pytest takes this back at the end of each test.
        warnings.filterwarnings("ignore" if lacks else "error", category=FallbackWarning)

    @pytest.fixture(autouse=True)
    def _serves(self, request: pytest.FixtureRequest, accelerator: Accelerator, _no_fallback: None) -> None:
        """Where the strategy cannot serve an accelerator, one test says so, and the others are skipped."""
        key = (type(self), accelerator.name)
        if key not in self._refusals:
            self._refusals[key] = self._refusal(accelerator)
        refusal = self._refusals[key]
        if refusal is not None and request.function.__name__ != "test_it_copies_or_says_why_not":
            pytest.skip(refusal)

    def _refusal(self, accelerator: Accelerator) -> str | None:
        """Why the strategy does not make the plainest copy, or None."""
        with self.make_transfer(accelerator) as transfer:
            try:
                transfer.copy(accelerator.device_empty(8, dtype=torch.float32), torch.zeros(8))
            except StrategyUnavailableError as error:
                return str(error)
            except Exception:  # noqa: BLE001 - the tests raise it too, and show it
                return None
        return None

    @pytest.fixture
    def transfer(self, accelerator: Accelerator) -> Iterator[HostToDeviceTransfer]:
        """The strategy under test. A test is skipped if it submits a copy for which ``why_not`` has a reason."""
        transfer = self.make_transfer(accelerator)
        for name in ("submit", "copy"):
            setattr(transfer, name, self._or_skip(transfer, getattr(transfer, name)))
        yield transfer
        transfer.close()
        assert transfer.pinned_bytes == 0

    @staticmethod
    def _or_skip(transfer: HostToDeviceTransfer, method: Callable[..., Any]) -> Callable[..., Any]:
        def made(destination: Tensor, source: Any) -> Any:
            try:
                return method(destination, source)
            except StrategyUnavailableError as error:
                assert transfer.why_not(destination, source) is not None, "a strategy says beforehand what it cannot do"
                pytest.skip(str(error))

        return made
