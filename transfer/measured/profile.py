"""The measurements of one machine that `h2d tune` writes and ``estimate`` interpolates."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from accelerators import Accelerator
from accelerators.hardware import cores, cpu_model, device_name

from ..memory.host_budget import local_ranks
from ..schema.fields import DtypeName, refuse
from ..schema.model import ConfigModel
from .profile_file import load_profile, save_profile

#: Raised whenever a file written before could be misread.
FORMAT_VERSION: Literal[2] = 2

#: The least gain for which more memory or threads are worth it.
WORTH_MORE = 0.02
#: Ranks share the link and the memory, and threads make the cast: a profile holds up to this factor in either.
_SAME_WITHIN = 1.5


def _positive(value: Any) -> float:
    if isinstance(value, str):  # YAML 1.1 reads 1e-5, without a point, as text
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise refuse("expected a number above 0, such as 1.5e-03")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise refuse("expected a whole number, at least 1")
    return value


def _date(value: Any) -> str:
    text = value.isoformat() if hasattr(value, "isoformat") else value  # YAML reads a bare date as one
    if not isinstance(text, str):
        raise refuse("expected a date such as 2026-11-30")
    return text


def _some(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    if not entries:
        raise refuse("expected at least one")
    return entries


def _rising(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    sizes = [entry.elements for entry in entries]
    if any(larger <= smaller for smaller, larger in pairwise(sizes)):
        raise refuse(f"the sizes must rise, and they are {sizes}")
    return _some(entries)


Positive = Annotated[float, BeforeValidator(_positive)]
Count = Annotated[int, BeforeValidator(_count)]


class Machine(ConfigModel):
    """The hardware that was measured, without the host's name, as the nodes of a cluster may share a profile.

    Attributes:
        accelerator: The name it is registered under.
        device: The device's model.
        cpu: The host processor's model.
        cores: Logical cores of the whole host.
    """

    accelerator: StrictStr
    device: StrictStr
    cpu: StrictStr
    cores: Count


class Circumstances(ConfigModel):
    """When and how it was measured.

    Attributes:
        date: ISO 8601.
        torch_version: torch's.
        ranks: Processes that measured at the same time, each on a device of its own.
        threads_per_rank: Host threads of each.
        source_dtype: On the host.
        destination_dtype: On the device.
    """

    date: Annotated[str, BeforeValidator(_date)]
    torch_version: StrictStr
    ranks: Count
    threads_per_rank: Count
    source_dtype: DtypeName = torch.float32
    destination_dtype: DtypeName = torch.bfloat16


class CopyTime(ConfigModel):
    """Copies of one size: the median of several rounds, in each of which the slowest rank counts.

    Attributes:
        elements: Of the copy.
        copy_seconds: Until ``copy`` returns.
        submit_seconds: Until ``submit`` returns.
        total_seconds: From ``submit`` until the destination holds the values.
    """

    elements: Count
    copy_seconds: Positive
    submit_seconds: Positive
    total_seconds: Positive


class StrategyTimes(ConfigModel):
    """One strategy as it was configured.

    Attributes:
        strategy: Its registered name.
        settings: The part of its configuration on which its speed depends: ``chunk_elements``, ``buffers``, ``mapped``.
        times: By rising ``elements``.
    """

    strategy: StrictStr
    settings: dict[StrictStr, StrictBool | StrictInt] = Field(default_factory=dict)
    times: Annotated[tuple[CopyTime, ...], AfterValidator(_rising)]


class UpdateTime(ConfigModel):
    """Seconds in which the optimizer updates ``elements`` on the host in one call."""

    elements: Count
    seconds: Positive


class Optimizer(ConfigModel):
    """The optimizer on the host. A tile is large enough if its rate is that of the largest one.

    Attributes:
        name: Its name.
        updates: By rising ``elements``.
    """

    name: StrictStr
    updates: Annotated[tuple[UpdateTime, ...], AfterValidator(_rising)]

    @property
    def tile_elements(self) -> int:
        """The smallest update that is as fast as the fastest, for each element, within 2%."""
        least = min(one.seconds / one.elements for one in self.updates) * (1 + WORTH_MORE)
        return next(one.elements for one in self.updates if one.seconds / one.elements <= least)


class DriveRate(ConfigModel):
    """Rates of the slowest rank: ``threads`` of each rank read and write a file in requests of ``request_bytes``."""

    request_bytes: Count
    threads: Count
    read_bytes_per_second: Positive
    written_bytes_per_second: Positive


class Drive(ConfigModel):
    """The file system of one directory, measured with one file for each rank.

    Attributes:
        file_system: Its type, such as ``ext4``.
        direct: Whether the files were written and read past the page cache. False: the rates include the cache's.
        rates: Every combination of threads and request that was measured, reading and writing one after the other.
        mixed: The same while as many threads read as write: what ZeRO-3's state in files does. None: not measured.
    """

    file_system: StrictStr
    direct: StrictBool
    rates: Annotated[tuple[DriveRate, ...], AfterValidator(_some)]
    mixed: Annotated[tuple[DriveRate, ...], AfterValidator(_some)] | None = None

    @property
    def best_read(self) -> DriveRate:
        """The fewest threads, and then the smallest requests, that read within 2% of the highest rate."""
        return _best(self.rates, lambda one: one.read_bytes_per_second)

    @property
    def best_write(self) -> DriveRate:
        """As ``best_read``, of writing."""
        return _best(self.rates, lambda one: one.written_bytes_per_second)

    @property
    def best_mixed(self) -> DriveRate | None:
        """As ``best_read``, of the slower one of reading and writing at once; None where that was not measured."""
        if self.mixed is None:
            return None
        return _best(self.mixed, lambda one: min(one.read_bytes_per_second, one.written_bytes_per_second))


def _best(rates: Sequence[DriveRate], rate: Callable[[DriveRate], float]) -> DriveRate:
    enough = max(map(rate, rates)) * (1 - WORTH_MORE)
    return min((one for one in rates if rate(one) >= enough), key=lambda one: (one.threads, one.request_bytes))


class MachineProfile(ConfigModel):
    """Measurements of one machine. Frozen, picklable, cheap to hash.

    Attributes:
        format_version: Of the file.
        machine: What was measured.
        measured: When and how.
        copies: Each strategy in each configuration that was tried, the configured one first.
        not_measured: Each strategy that could not copy here, and why, as one sentence.
        optimizer: Its updates hide deferred copies. None: not measured.
        drive: Measured by `h2d tune --nvme`; else None.
    """

    format_version: Literal[2] = FORMAT_VERSION
    machine: Machine
    measured: Circumstances
    copies: Annotated[tuple[StrategyTimes, ...], AfterValidator(_some)]
    not_measured: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    optimizer: Optimizer | None = None
    drive: Drive | None = None

    def __hash__(self) -> int:
        """Of the date alone: each copy looks its profile up in a cache."""
        return hash(self.measured.date)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> MachineProfile | None:
        """Reads a profile.

        Args:
            path: The file; None: ``$H2D_PROFILE``, or else ``default_path()``.

        Returns:
            The profile, or None if no file is named and the default one does not exist.

        Raises:
            ConfigFileNotFoundError: The file that was named does not exist.
            ConfigFileError: The file cannot be read.
            ConfigError: The file is not a profile; lists every mistake with file, line and key.
        """
        return load_profile(cls, FORMAT_VERSION, path)

    def save(self, path: str | os.PathLike[str] | None = None) -> str:
        """Writes the profile as YAML, whole or not at all; returns the file's name.

        Args:
            path: As for ``load``. Missing folders are made.

        Raises:
            ConfigFileError: The file cannot be written. A file that was there before is unchanged.
        """
        return save_profile(self, path)

    def mismatch(self, accelerator: Accelerator) -> str | None:
        """One sentence on why this is not a profile of what this process runs on, or None if it is.

        The hardware must be the same. The number of ranks on this host (``LOCAL_WORLD_SIZE``) and of torch's threads
        may each differ by a factor of 1.5.
        """
        names = {"accelerator": accelerator.name, "device": device_name(accelerator), "cpu": cpu_model()}
        here = Machine(**names, cores=cores())
        for field in Machine.model_fields:
            then, now = getattr(self.machine, field), getattr(here, field)
            if then != now:
                what = "number of cores" if field == "cores" else field
                return f"The profile was measured on another machine: its {what} is {then!r}, here it is {now!r}."
        ranks, threads = local_ranks(), torch.get_num_threads()
        for what, then, now in (
            ("ranks on this host", self.measured.ranks, ranks),
            ("host threads a rank", self.measured.threads_per_rank, threads),
        ):
            if max(then, now) > _SAME_WITHIN * min(then, now):
                again = f"`h2d tune --ranks {ranks} --threads {threads}` measures what runs here"
                return f"The profile was measured with {then} {what}, and this process has {now}; {again}."
        return None
