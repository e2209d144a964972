"""Errors of ``accelerators``.

::

    AcceleratorError
    ├── AcceleratorRegistrationError (ValueError)   a name or factory that cannot be registered
    ├── UnknownAcceleratorError      (LookupError)  no accelerator of this name is registered
    ├── InvalidAcceleratorError      (TypeError)    an object that lacks part of the protocol
    ├── AcceleratorUnavailableError  (RuntimeError) the hardware, driver or package is not there
    └── InFlightError                (RuntimeError) memory was given back while a copy still used it

Each also derives from the builtin that a caller would catch.
"""

from __future__ import annotations


class AcceleratorError(Exception):
    """Base of everything that ``accelerators`` raises on its own account."""


class AcceleratorRegistrationError(AcceleratorError, ValueError):
    """A registration was refused; the registry is unchanged."""


class UnknownAcceleratorError(AcceleratorError, LookupError):
    """No accelerator is registered under the name asked for."""


class InvalidAcceleratorError(AcceleratorError, TypeError):
    """An object given as an accelerator lacks members of the ``Accelerator`` protocol."""


class AcceleratorUnavailableError(AcceleratorError, RuntimeError):
    """The accelerator is known, but its hardware, driver or package is missing here."""


class InFlightError(AcceleratorError, RuntimeError):
    """Host memory was unpinned or unregistered while an unfinished copy still used it.

    Only the simulated accelerator can notice this; on real hardware it is silent corruption.
    The memory stays pinned.
    """


#: What pinning may raise when it is refused: torch's errors, the system's, and a vendor's.
REFUSALS = (RuntimeError, MemoryError, OSError, AcceleratorError)
