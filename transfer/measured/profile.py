"""What `h2d tune` has measured of a machine, from which ``cost_model`` tells how long a copy takes."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, StrictBool, StrictStr, field_validator

from accelerators import Accelerator
from accelerators.hardware import cores, cpu_model, device_name

from ..memory.host_budget import local_ranks
from ..schema.fields import refuse
from ..schema.model import ConfigModel
from .profile_file import load_profile, save_profile

#: Raised whenever a file written before could be misread.
FORMAT_VERSION: Literal[1] = 1

#: Speeds are shared out among ranks and grow with threads: beyond this factor they are others.
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


Positive = Annotated[float, BeforeValidator(_positive)]
Count = Annotated[int, BeforeValidator(_count)]


class Machine(ConfigModel):
    """Which hardware was measured. Not the host's name: the nodes of a cluster may share a profile.

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
    """

    date: Annotated[str, BeforeValidator(_date)]
    torch_version: StrictStr
    ranks: Count
    threads_per_rank: Count


class WireTime(ConfigModel):
    """Seconds for each of many page-locked chunks of ``chunk_bytes`` in flight back to back."""

    chunk_bytes: Count
    seconds: Positive


class CastRate(ConfigModel):
    """How fast the host casts fp32 to bf16 into one page-locked buffer of ``chunk_elements``, used over and over."""

    chunk_elements: Count
    elements_per_second: Positive


class PageableTime(ConfigModel):
    """Seconds for one blocking copy of fp32 from pageable memory into bf16 on the device."""

    elements: Count
    seconds: Positive


class DriveRate(ConfigModel):
    """How fast ``threads`` read, or write, a file in blocks of ``block_bytes``."""

    block_bytes: Count
    threads: Count
    bytes_per_second: Positive


class Drive(ConfigModel):
    """The file system of one directory, measured with one file for each rank.

    Attributes:
        file_system: Its type, such as ``ext4``.
        direct: Whether the files were written and read past the page cache. False: these are not quite the drive's
            own rates.
        read: Every combination that was measured.
        write: As ``read``; over what the file held before.
        best_read: The one with the fewest threads, and then the smallest blocks, of those that are fast.
        best_write: As ``best_read``.
    """

    file_system: StrictStr
    direct: StrictBool
    read: tuple[DriveRate, ...]
    write: tuple[DriveRate, ...]
    best_read: DriveRate
    best_write: DriveRate


class MachineProfile(ConfigModel):
    """Measurements of one machine: the slowest rank's medians. Frozen, picklable, cheap to hash.

    What could not be measured is None or empty, and ``lacks`` says why.

    Attributes:
        format_version: Of the file.
        machine: What was measured.
        measured: When and how.
        wire: By rising ``chunk_bytes``.
        host_cast: By rising ``chunk_elements``.
        pageable: By rising ``elements``.
        staged_chunk_seconds: Host seconds for each chunk of a staging ring beyond its cast: taking the
            buffer, queueing the copy, recording its event.
        direct_chunk_seconds: Host seconds to queue one chunk that is cast on the device.
        latency_seconds: From the moment a chunk is on the wire to the host having seen the end of it,
            beyond the wire's own time.
        device_cast_elements_per_second: fp32 to bf16 in device memory.
        mapped_elements_per_second: fp32 in page-locked host memory, read by the device and cast to bf16.
        page_lock_seconds_per_gib: For page-locking existing memory in place, once.
        host_update_elements_per_second: Of an Adam update on the host, behind which a deferred copy hides.
        drive: Where `h2d tune --nvme` was asked for.
        lacks: Each capability that strategies need and the machine has not, and why, as one sentence.
    """

    format_version: Literal[1] = FORMAT_VERSION
    machine: Machine
    measured: Circumstances
    wire: tuple[WireTime, ...] = ()
    host_cast: tuple[CastRate, ...] = ()
    pageable: tuple[PageableTime, ...] = Field(min_length=1)
    staged_chunk_seconds: Positive | None = None
    direct_chunk_seconds: Positive | None = None
    latency_seconds: Positive | None = None
    device_cast_elements_per_second: Positive | None = None
    mapped_elements_per_second: Positive | None = None
    page_lock_seconds_per_gib: Positive | None = None
    host_update_elements_per_second: Positive
    drive: Drive | None = None
    lacks: dict[StrictStr, StrictStr] = Field(default_factory=dict)

    @field_validator("wire", "host_cast", "pageable")
    @classmethod
    def _rising(cls, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = [getattr(entry, next(iter(type(entry).model_fields))) for entry in entries]
        if any(larger <= smaller for smaller, larger in pairwise(sizes)):
            raise refuse(f"the sizes must rise, and they are {sizes}")
        return entries

    def __hash__(self) -> int:
        """Of the date alone: profiles are keys of caches that are asked in every copy."""
        return hash(self.measured.date)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> MachineProfile | None:
        """Reads a profile.

        Args:
            path: The file; None: ``$H2D_PROFILE``, or else ``default_path()``.

        Returns:
            The profile, or None where nobody named a file and nothing was measured yet.

        Raises:
            ConfigFileNotFoundError: The file that was named does not exist.
            ConfigFileError: It cannot be read.
            ConfigError: It is not a profile; every mistake with file, line and key.
        """
        return load_profile(cls, FORMAT_VERSION, path)

    def save(self, path: str | os.PathLike[str] | None = None) -> str:
        """Writes the profile as YAML, whole or not at all; returns the file's name.

        Args:
            path: As for ``load``. Folders on the way are made.

        Raises:
            ConfigFileError: The file cannot be written; what stood there before is unchanged.
        """
        return save_profile(self, path)

    def mismatch(self, accelerator: Accelerator) -> str | None:
        """One sentence on why this is not a profile of what this process runs on, or None if it is.

        The hardware must be the same. The ranks of this host (``LOCAL_WORLD_SIZE``) share the wire and the
        host's memory, and torch's threads make the cast: either may differ by a factor of 1.5.
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
