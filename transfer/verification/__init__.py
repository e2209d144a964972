"""``verify: sample`` and ``verify: full``: what a copy has left is compared with the host's own cast of its source.

``sampling`` says which elements, and what they must be. ``reading`` brings them back from the device. ``comparing``
finds the wrong ones. ``verifier`` puts these around the copies of one transfer.
"""

from __future__ import annotations

from .verifier import Verifier

__all__ = ["Verifier"]
