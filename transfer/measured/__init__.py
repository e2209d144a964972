"""``strategy: measured``: a profile of this machine, and which strategy it expects to be fastest."""

from .estimate import CANDIDATES, fastest
from .profile import MachineProfile

__all__ = ["CANDIDATES", "MachineProfile", "fastest"]
