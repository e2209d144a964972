"""Until ``transfer.nvme`` exists: what restoring masters needs of it, a handle to a file that ``submit`` takes."""

import importlib.util
import math
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import torch

from transfer import HostToDeviceTransfer


@dataclass(frozen=True)
class SwappedTensor:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int = 0

    @classmethod
    def from_file(cls, path, dtype, shape, offset_bytes=0):
        return cls(Path(path), dtype, shape, offset_bytes)

    def read(self):
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes)
            found = bytearray(file.read(num_bytes))
        if len(found) < num_bytes:
            raise OSError(f"{self.path} is too short")
        return torch.frombuffer(found, dtype=self.dtype).view(self.shape)


def stand_in_if_missing(set_item=dict.__setitem__, set_attribute=setattr):
    """Puts the stand-in where ``transfer.nvme`` would be. The arguments are how, for who wants it undone."""
    if "transfer.nvme" in sys.modules or importlib.util.find_spec("transfer.nvme") is not None:
        return
    module = types.ModuleType("transfer.nvme")
    module.SwappedTensor = SwappedTensor
    set_item(sys.modules, "transfer.nvme", module)
    submit = HostToDeviceTransfer.submit

    def reading_submit(self, destination, source):
        return submit(self, destination, source.read() if isinstance(source, SwappedTensor) else source)

    set_attribute(HostToDeviceTransfer, "submit", reading_submit)
