"""A conformance suite for strategies: the contract of ``HostToDeviceTransfer`` as tests. Needs pytest.

A strategy's test file::

    from transfer.testing import TransferConformance

    class TestMine(TransferConformance):
        accelerator_name = "cuda"

        def make_transfer(self, accelerator):
            return MyTransfer(accelerator=accelerator)

The suite prepares destinations and reads results without the strategy under test.
Sources are pageable, page-locked by ``prepare``, and pinned by ``pin_empty``; each is copied as it is and cast.
"""

from __future__ import annotations

from ._hooks import from_bits, random_bits
from .failures import CleanFailures
from .lifetimes import Lifetimes
from .nothing_else import WritesNothingElse
from .refusals import Refuses
from .same_bits import SameBits
from .streams import Ordering


class TransferConformance(SameBits, WritesNothingElse, Refuses, Lifetimes, CleanFailures, Ordering):
    """The whole contract of a strategy. Subclass it, define the hooks, and pytest runs it.

    Hooks: ``accelerator_name`` or ``make_accelerator``, and ``make_transfer``. Make the transfer with
    chunks of a few hundred elements, so that its buffers refill often in the tests here, or set
    ``several_chunks`` to a number of fp32 elements that needs each buffer more than once. A
    ``FallbackWarning`` fails a test, unless the accelerator lacks events or pinning.

    Where the strategy raises ``StrategyUnavailableError`` for the simplest copy to this accelerator, one test checks
    that ``why_not`` had a reason and nothing was written. The others are skipped with that reason, and so is each test
    of a copy that the strategy cannot make.

    The parts may be subclassed alone, for a strategy's other options: ``SameBits``, ``WritesNothingElse``,
    ``Refuses``, ``Lifetimes``, ``CleanFailures``, ``Ordering``.
    """


__all__ = [
    "CleanFailures",
    "Lifetimes",
    "Ordering",
    "Refuses",
    "SameBits",
    "TransferConformance",
    "WritesNothingElse",
    "from_bits",
    "random_bits",
]
