"""A conformance suite for accelerators, and tools to test with them. Needs pytest.

A vendor's test file::

    from accelerators.testing import AcceleratorConformance

    class TestAcme(AcceleratorConformance):
        accelerator_name = "acme"
"""

from __future__ import annotations

from .conformance import AcceleratorConformance
from .faults import ANY_METHOD, failing
from .tools import accelerator_or_skip, bits, check_values, fetch, skip_without, unavailable_reason

__all__ = [
    "ANY_METHOD",
    "AcceleratorConformance",
    "accelerator_or_skip",
    "bits",
    "check_values",
    "failing",
    "fetch",
    "skip_without",
    "unavailable_reason",
]
