"""Seconds and bytes of one rank's iteration, for each way to train with the optimizer's state off the device.

n is the number of elements whose masters a rank keeps on the host. Bytes an element, read in DeepSpeed 0.19.8 and torch
2.13 (`n` is left out):

* **unscale and clip**: DeepSpeed reads and writes the fp32 gradient: 8 of host memory.
* **CPU Adam** reads master, two moments and gradient, writes all but the gradient: 28. With a gradient that is made in
  the caches, 24, and the cast of it.
* **gradients**: DeepSpeed's go to the host in 16 bits, back, and to the host in fp32: 8 over the link. Once: 2.
* **copy-back**: `copy_` from pageable memory at its own rate; `pinned_staged` casts on the host; `pinned_direct` sends
  4 over the link while the next tiles are updated; with `offload_param` the host casts: 6 of memory, or 2 from caches.
* **parameters** with `offload_param` go to the device in forward and in backward: 2 x 2; FSDP2 sends fp32: 2 x 4.
* **FSDP2's step** reads each gradient for its norm, scales it, and updates: 40.
* **files**: DeepSpeed writes gradients in backward (4), reads all (16), writes state (12). Ours reads 12 and writes 12.

What is not in it: Python within a step, activations, gathered parameters, communication that is not hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import PYTHON_OF_A_LAYER, SLOWED_BY_COPIES, Rates

DEEPSPEED, RING, OFFLOAD_PARAM = "DeepSpeed", "DeepSpeed, staging ring", "DeepSpeed, offload_param"
PAGEABLE, STAGED, DIRECT, OURS_PARAM = "pageable", "pinned_staged", "pinned_direct (default)", "default, offload_param"
FSDP2 = "FSDP2, CPU offload"
PIPELINED, TILES = "DeepSpeed, pipelined", "default (tiles)"

#: Of the ring that copies are staged through, and the device memory of copies that are waited for.
_RING_BYTES, _SCRATCH_BYTES = 2 * 2**24 * 2, 2 * 2**22 * 4
#: Eight tiles of 2^20 elements with master, moments and a gradient, of which masters are page-locked.
_TILES_BYTES, _TILES_LOCKED_BYTES = 8 * 2**20 * 18, 8 * 2**20 * 4


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is spread.

    Attributes:
        parameters: Of the model.
        ranks: Of each node.
        nodes: Of the job.
        ratio: The share of the optimizer's state that is off the device.
        sub_group_elements: DeepSpeed's ``sub_group_size``.
        tokens: Of each rank in one iteration.
        layers: Of the model.
    """

    parameters: int
    ranks: int = 1
    nodes: int = 1
    ratio: float = 1.0
    sub_group_elements: int = 10**9
    tokens: int = 2048
    layers: int | None = None

    @property
    def share(self) -> float:
        """Elements of one rank."""
        return self.parameters / (self.ranks * self.nodes)

    @property
    def on_host(self) -> float:
        """Those of them whose masters are not on the device."""
        return self.share * self.ratio

    @property
    def sub_groups(self) -> list[float]:
        """Elements of each sub-group that is not on the device."""
        whole, rest = divmod(self.on_host, self.sub_group_elements)
        return [self.sub_group_elements] * int(whole) + ([rest] if rest >= 1 else [])

    @property
    def depth(self) -> int:
        """Layers; where they are not given, about those that models of this size have (16 for 1e9, 51 for 32e9)."""
        return self.layers or max(1, round(16 * (self.parameters / 1e9) ** (1 / 3)))


@dataclass(frozen=True)
class Prediction:
    """One way to train. Seconds of an iteration; bytes of one rank.

    Attributes:
        name: The way.
        copy_back_seconds: What the step waits for masters on their way to the device. None: no such copy is made.
        step_seconds: Of the optimizer.
        iteration_seconds: Forward, backward and step.
        pinned_bytes: Host memory that torch or this package allocates pinned, or DeepSpeed locks.
        page_locked_bytes: Ordinary memory that this package page-locks in place.
        host_bytes: All host memory of the model's states, pinned or not.
        device_bytes: Memory of the device for the model's states, without gathered parameters.
    """

    name: str
    copy_back_seconds: float | None
    step_seconds: float
    iteration_seconds: float
    pinned_bytes: float
    page_locked_bytes: float
    host_bytes: float
    device_bytes: float


def predict(job: Job, rates: Rates) -> dict[str, Prediction]:
    """Every way to train, by name; DeepSpeed as it is comes first. With a drive, the state is in files."""
    ways = _in_memory(job, rates) if rates.drive is None else _in_files(job, rates, rates.drive)
    return {way.name: way for way in ways}


def forward_and_backward(job: Job, rates: Rates, parameter_bytes: float) -> float:
    """Seconds without gradients' way to the host: the longest of what goes on at the same time.

    ``parameter_bytes`` of each element come from the host, in each of the two. All-gathers twice and a reduce-scatter
    move 2 bytes a parameter each.
    """
    world = job.ranks * job.nodes
    computing = 6 * job.parameters * job.tokens / rates.operations
    communicating = 3 * 2 * job.parameters * (world - 1) / world / rates.between
    fetching = 2 * parameter_bytes * job.share / rates.link
    return max(computing, communicating, fetching, job.depth * PYTHON_OF_A_LAYER)


def _in_memory(job: Job, rates: Rates) -> list[Prediction]:
    n, of_memory, of_link = job.on_host, job.on_host / rates.memory, job.on_host / rates.link
    resident = forward_and_backward(job, rates, 0)
    fetched = forward_and_backward(job, rates, 2)
    separate = (8 + 28) * of_memory
    in_tiles = 24 * of_memory + n / rates.cached
    pageable, staged = n / rates.pageable, n / rates.staged
    behind = max(in_tiles * SLOWED_BY_COPIES, 4 * of_link) - in_tiles
    half = 2 * job.share
    device = half + 16 * (job.share - n)
    gradients, fp32 = _pinned([2 * n]), _pinned([4 * each for each in job.sub_groups])
    parameters = _pinned([half])
    many = 18 * n  # masters, moments and the two buffers of gradients

    def way(
        name: str, update: float, copy_back: float, gradient_bytes: int, *memory: float, before: float = resident
    ) -> Prediction:
        step = update + copy_back
        return Prediction(name, copy_back, step, before + gradient_bytes * of_link + step, *memory)

    ring = float(_RING_BYTES)
    return [
        way(DEEPSPEED, separate, pageable, 8, gradients + fp32, 0, many, device),
        way(RING, separate, staged, 8, gradients + fp32 + 2**28, 0, many + 2**28, device),
        way(PAGEABLE, in_tiles, pageable, 2, gradients, 0, many - 4 * n, device),
        way(STAGED, in_tiles, staged, 2, gradients + ring, 0, many - 4 * n + ring, device),
        way(DIRECT, in_tiles, behind, 2, gradients, 4 * n, many - 4 * n, device + _SCRATCH_BYTES),
        way(
            OFFLOAD_PARAM,
            separate,
            6 * of_memory,
            8,
            gradients + fp32 + parameters,
            0,
            many + half,
            device - half,
            before=fetched,
        ),
        way(
            OURS_PARAM,
            in_tiles,
            2 * of_memory,
            2,
            gradients + parameters,
            0,
            many - 4 * n + half,
            device - half,
            before=fetched,
        ),
        _fsdp2(job, rates),
    ]


def _fsdp2(job: Job, rates: Rates) -> Prediction:
    """It offloads all parameters, whatever the ratio; gradients go to the host while backward goes on."""
    step = (4 + 8 + 28) * job.share / rates.memory
    whole = forward_and_backward(job, rates, 4) + step
    return Prediction(FSDP2, None, step, whole, 8 * job.share, 0, 16 * job.share, 0)


def _in_files(job: Job, rates: Rates, drive: float) -> list[Prediction]:
    n, of_memory = job.on_host, job.on_host / rates.memory
    before = forward_and_backward(job, rates, 0)
    over_link = 8 * n / rates.link
    gradients = _pinned([2 * n])
    device = 2 * job.share + 16 * (job.share - n)
    largest = max(job.sub_groups, default=0.0)
    pageable, computing = n / rates.pageable, 36 * of_memory
    ways = []
    for name, buffers, seconds in (
        (DEEPSPEED, 5, 28 * n / drive + computing + pageable),
        (PIPELINED, 12, max(28 * n / drive, computing + pageable)),
    ):
        locked = gradients + buffers * 4 * largest
        whole = before + over_link + 4 * n / drive + seconds
        ways.append(Prediction(name, pageable, seconds, whole, locked, 0, locked, device))
    update = (24 * of_memory + n / rates.cached) * SLOWED_BY_COPIES
    step = max(24 * n / drive, update, 4 * n / rates.link)
    locked = gradients + 5 * 4 * largest + _TILES_BYTES
    whole = before + 2 * n / rates.link + step
    return [*ways, Prediction(TILES, 0.0, step, whole, locked - _TILES_BYTES, _TILES_LOCKED_BYTES, locked, device)]


def _pinned(allocations: list[float]) -> float:
    """Bytes of allocations that torch pins: each is rounded up to a power of two."""
    return float(sum(2 ** (int(each) - 1).bit_length() for each in allocations if each >= 1))
