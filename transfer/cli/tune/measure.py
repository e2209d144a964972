"""What `h2d tune` measures, over the ``Accelerator`` protocol only; as in ``MachineProfile``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerators import Accelerator
from accelerators.errors import REFUSALS

from ..measuring.ranks import Ranks

#: What is copied, as in ZeRO-3.
SOURCE, DESTINATION = torch.float32, torch.bfloat16
#: As in strategies; and ValueError, for sizes that an accelerator does not take.
_REFUSALS = (*REFUSALS, ValueError)
#: A chunk whose transfer is over long before the host has queued the next.
_TINY_ELEMENTS = 1024
#: Chunks that are queued to time the queueing: few enough for every driver's queue.
_QUEUED = 32


class PinningRefusedError(RuntimeError):
    """No page-locked memory is to be had; the message is one sentence."""


@dataclass(frozen=True)
class Bench:
    """Times things on all ranks at once.

    Attributes:
        accelerator: On whose current device.
        ranks: Which begin each measurement together; the slowest counts.
        rounds: After one that warms up; the median counts.
        largest_chunk: Elements of the largest chunk, at least 1024. A rank uses up to 14 bytes of host memory
            for each.
    """

    accelerator: Accelerator
    ranks: Ranks
    rounds: int
    largest_chunk: int

    @property
    def chunks(self) -> list[int]:
        """Sizes of chunks in elements, rising: finer where rings are fastest."""
        return sorted({max(1, self.largest_chunk >> shift) for shift in (0, 1, 2, 3, 4, 6, 8)})

    def seconds(self, work: Callable[[], Any], settle: Callable[[], Any] | None = None) -> float:
        """Seconds that ``work`` takes; ``settle`` runs after it and is not timed."""
        rounds = []
        for _ in range(self.rounds + 1):
            self.ranks.barrier()
            started = time.perf_counter()
            work()
            rounds.append(time.perf_counter() - started)
            if settle is not None:
                settle()
        slowest = [max(of_ranks) for of_ranks in zip(*self.ranks.gather(rounds[1:]), strict=True)]
        return max(float(statistics.median(slowest)), 1e-9)  # a coarse clock may say 0

    def refusal(self, attempt: Callable[[], Any]) -> str | None:
        """What the first rank on which ``attempt`` fails has to say of it; every rank gets the same answer."""
        message = None
        try:
            attempt()
        except _REFUSALS as error:
            message = str(error) or type(error).__name__
        return next((given for given in self.ranks.gather(message) if given is not None), None)

    @contextmanager
    def pinned(self, elements: int) -> Iterator[Tensor]:
        """Page-locked memory of the destination's dtype, given back once the device is idle.

        Raises:
            PinningRefusedError: On every rank, where one of them gets none.
        """
        held: list[Tensor] = []

        def pin() -> None:
            held.append(self.accelerator.pin_empty(elements, dtype=DESTINATION))
            if not self.accelerator.is_pinned(held[0]):
                raise RuntimeError(f"{self.accelerator.name}.pin_empty returned memory that is not pinned")

        try:
            refusal = self.refusal(pin)
            if refusal is not None:
                size = elements * DESTINATION.itemsize
                raise PinningRefusedError(f"Pinning {size} bytes failed: {refusal.rstrip('.')}.")
            yield held[0].fill_(1)
        finally:
            self.accelerator.synchronize()
            while held:
                self.accelerator.unpin_memory(held.pop())


def wire(bench: Bench, buffer: Tensor) -> list[dict[str, float]]:
    """Many chunks in flight back to back, for several sizes."""
    accelerator, found = bench.accelerator, []
    target = accelerator.device_empty(bench.largest_chunk, dtype=DESTINATION)
    for chunk in bench.chunks:
        count = max(2, min(128, 2 * bench.largest_chunk // chunk))
        source, destination = buffer.narrow(0, 0, chunk), target.narrow(0, 0, chunk)

        def work(count: int = count, source: Tensor = source, destination: Tensor = destination) -> None:
            for _ in range(count):
                accelerator.enqueue_copy(destination, source)
            accelerator.synchronize()

        found.append({"chunk_bytes": chunk * DESTINATION.itemsize, "seconds": bench.seconds(work) / count})
    return found


def host_cast(bench: Bench, source: Tensor, buffer: Tensor) -> list[dict[str, float]]:
    """The whole source through one page-locked buffer, for several sizes of it."""
    found = []
    for chunk in bench.chunks:
        pieces = torch.split(source, chunk)

        def work(pieces: tuple[Tensor, ...] = pieces) -> None:
            for piece in pieces:
                buffer.narrow(0, 0, piece.numel()).copy_(piece)

        found.append({"chunk_elements": chunk, "elements_per_second": source.numel() / bench.seconds(work)})
    return found


def staged_chunk(bench: Bench, source: Tensor, buffer: Tensor) -> float:
    """Host seconds for each chunk of a ring of two small buffers, less the cast of that size alone.

    In a running ring, because waking up for an event and casting after it costs more than either alone.
    """
    accelerator = bench.accelerator
    chunk = bench.chunks[0]
    pieces = torch.split(source, chunk)[:256]
    halves = buffer.narrow(0, 0, chunk), buffer.narrow(0, buffer.numel() - chunk, chunk)
    target = accelerator.device_empty(chunk, dtype=DESTINATION)

    def ring() -> None:
        guards: list[Any] = [None, None]
        for index, piece in enumerate(pieces):
            if guards[index % 2] is not None:
                guards[index % 2].synchronize()
            halves[index % 2].copy_(piece)
            accelerator.enqueue_copy(target, halves[index % 2])
            guards[index % 2] = _recorded(accelerator)

    def casts() -> None:
        for index, piece in enumerate(pieces):
            halves[index % 2].copy_(piece)

    both, alone = bench.seconds(ring, accelerator.synchronize), bench.seconds(casts)
    return max(both - alone, 1e-7) / len(pieces)


def latency(bench: Bench, buffer: Tensor) -> float:
    """From queueing one tiny chunk to the host having seen its event."""
    accelerator = bench.accelerator
    source = buffer.narrow(0, 0, min(_TINY_ELEMENTS, buffer.numel()))
    target = accelerator.device_empty(source.numel(), dtype=DESTINATION)

    def work() -> None:
        for _ in range(_QUEUED):
            accelerator.enqueue_copy(target, source)
            _recorded(accelerator).synchronize()

    return bench.seconds(work) / _QUEUED


def direct_chunk(bench: Bench, buffer: Tensor) -> float:
    """Host seconds to queue one chunk that crosses as it is and is cast on the device."""
    accelerator = bench.accelerator
    # As many elements of the wider dtype as fit.
    tiny = min(_TINY_ELEMENTS, buffer.numel() // 2)
    source = buffer.narrow(0, 0, 2 * tiny).view(SOURCE)
    streams = [accelerator.Stream(), accelerator.Stream()] if accelerator.Stream is not None else [None, None]
    scratch = [accelerator.device_empty(source.numel(), dtype=source.dtype) for _ in streams]
    targets = [accelerator.device_empty(source.numel(), dtype=DESTINATION) for _ in streams]

    def work() -> None:
        for stream, buffer, target in zip(streams, scratch, targets, strict=True):
            with accelerator.stream(stream):
                for _ in range(_QUEUED // 2):
                    accelerator.enqueue_copy(buffer, source)
                    accelerator.enqueue_copy(target, buffer)
                _recorded(accelerator)

    return bench.seconds(work, accelerator.synchronize) / _QUEUED


def mapped_read(bench: Bench, memory: Tensor) -> float:
    """Elements a second that the device reads out of page-locked host memory and casts, in one kernel.

    On accelerators with the capability ``maps_host_memory``, of memory that can be registered.
    """
    accelerator: Any = bench.accelerator
    target = accelerator.device_empty(memory.numel(), dtype=DESTINATION)
    accelerator.register_host_memory(memory.data_ptr(), memory.nbytes)
    try:
        view = accelerator.device_view(memory)

        def work() -> None:
            accelerator.enqueue_copy(target, view)
            accelerator.synchronize()

        return memory.numel() / bench.seconds(work)
    finally:
        accelerator.synchronize()
        accelerator.unregister_host_memory(memory.data_ptr())


def device_cast(bench: Bench) -> float:
    """Elements a second that the device casts in its own memory."""
    accelerator, count = bench.accelerator, 8
    elements = max(1, bench.largest_chunk // 4)
    source = accelerator.device_empty(elements, dtype=SOURCE).fill_(1)
    target = accelerator.device_empty(elements, dtype=DESTINATION)

    def work() -> None:
        for _ in range(count):
            accelerator.enqueue_copy(target, source)
        accelerator.synchronize()

    return elements * count / bench.seconds(work)


def pageable(bench: Bench, source: Tensor) -> list[dict[str, float]]:
    """Blocking copies out of ordinary memory, of two sizes."""
    accelerator, found = bench.accelerator, []
    for elements in sorted({max(1, bench.largest_chunk // 64), bench.largest_chunk}):
        target = accelerator.device_empty(elements, dtype=DESTINATION)
        piece = source.narrow(0, 0, elements)

        def work(target: Tensor = target, piece: Tensor = piece) -> None:
            accelerator.enqueue_copy(target, piece)
            accelerator.synchronize()

        found.append({"elements": elements, "seconds": bench.seconds(work)})
    return found


def page_lock(bench: Bench, memory: Tensor) -> tuple[float | None, str | None]:
    """Seconds to page-lock a GiB of existing memory in place; or None, and why the accelerator cannot."""
    accelerator, address, num_bytes = bench.accelerator, memory.data_ptr(), memory.nbytes
    reason = accelerator.capabilities.why_not("registers_host_memory")
    if reason is not None:
        return None, reason

    held: list[int] = []

    def lock() -> None:
        if not accelerator.register_host_memory(address, num_bytes):
            raise RuntimeError("it answers that it cannot")
        held.append(address)

    def unlock() -> None:
        while held:  # forgotten after it is undone: an interrupted attempt is made again below
            accelerator.unregister_host_memory(held[-1])
            held.pop()

    try:
        refusal = bench.refusal(lock)
        unlock()
        if refusal is not None:
            return None, f"Page-locking {num_bytes} bytes in place failed: {refusal.rstrip('.')}."
        return bench.seconds(lock, unlock) * 2**30 / num_bytes, None
    finally:
        unlock()


def host_update(bench: Bench) -> float:
    """Elements a second of Adam on the host: torch's fused one, bound by memory as DeepSpeed's is."""
    elements = max(1, bench.largest_chunk // 2)
    weights = torch.ones(elements, device="cpu", requires_grad=True)
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    return elements / bench.seconds(optimizer.step)


def _recorded(accelerator: Accelerator) -> Any:
    event = accelerator.Event() if accelerator.Event is not None else None
    if event is not None:
        event.record()
    return event
