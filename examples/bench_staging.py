"""Which staging ring is fastest on this machine, and how far it is from the link itself.

    python examples/bench_staging.py --csv ring.csv

Copies the same fp32 master partition from ordinary host memory into a bf16 partition on the device,
through ``pageable`` and through rings of several sizes, in turn, so that a machine whose speed drifts
drifts for all of them. The first round warms up and compares every result with the direct copy, bit for
bit. Prints medians, the median of each round's ratio to ``pageable``, and the time that the link alone
needs for the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch

from accelerators import Accelerator, get_accelerator
from transfer import HostToDeviceTransfer, PageableTransfer, PinnedStagedTransfer

RINGS = [(2, 26), (2, 25), (2, 24), (2, 23), (2, 22), (3, 24), (3, 23), (4, 23), (4, 22), (8, 22)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", help="a registered name; default: what get_accelerator() returns")
    parser.add_argument("--elements", type=int, default=2**28, help="elements of the partition (default 2^28)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each, interleaved (default 7)")
    parser.add_argument("--threads", type=int, help="host threads for the cast; default: torch's own")
    parser.add_argument("--csv", type=Path, help="also write every measurement there")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    accelerator = get_accelerator(options.accelerator)
    reason = accelerator.unavailable_reason()
    if reason is not None:
        raise SystemExit(reason)

    source = torch.randn(options.elements)
    destination = accelerator.device_empty(options.elements, dtype=torch.bfloat16)
    expected = source.bfloat16()
    schemes: dict[str, HostToDeviceTransfer] = {"pageable": PageableTransfer(accelerator=accelerator)}
    for buffers, exponent in RINGS:
        if 2**exponent <= options.elements:
            schemes[f"staged {buffers} x 2^{exponent}"] = PinnedStagedTransfer(
                accelerator=accelerator, chunk_elements=2**exponent, buffers=buffers
            )
    seconds: dict[str, list[float]] = {name: [] for name in ("link alone", *schemes)}
    pinned_bytes = dict.fromkeys(seconds, 0)
    for round_number in range(options.rounds + 1):
        seconds["link alone"].append(link_seconds(accelerator, destination))
        for name, transfer in schemes.items():
            destination.fill_(-1)
            accelerator.synchronize()
            started = time.perf_counter()
            transfer.copy(destination, source)
            seconds[name].append(time.perf_counter() - started)
            pinned_bytes[name] = transfer.pinned_bytes
            if round_number == 0 and not torch.equal(destination.cpu().view(torch.int16), expected.view(torch.int16)):
                raise SystemExit(f"{name}: wrong bits")
    for transfer in schemes.values():
        transfer.close()
    show(seconds, pinned_bytes, options.elements)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["scheme", "round", "seconds", "elements", "threads", "pinned_bytes"])
            for name, values in seconds.items():
                for round_number, value in enumerate(values[1:]):
                    row = [
                        name,
                        round_number,
                        f"{value:.6f}",
                        options.elements,
                        torch.get_num_threads(),
                        pinned_bytes[name],
                    ]
                    writer.writerow(row)


def link_seconds(accelerator: Accelerator, destination: torch.Tensor) -> float:
    """What the destination's bytes need to cross from pinned memory, 2^24 elements at a time."""
    piece = accelerator.pin_empty(min(2**24, destination.numel()), dtype=destination.dtype)
    accelerator.synchronize()
    started = time.perf_counter()
    for target in torch.split(destination, piece.numel()):
        accelerator.enqueue_copy(target, piece[: target.numel()])
    accelerator.synchronize()
    elapsed = time.perf_counter() - started
    accelerator.unpin_memory(piece)
    return elapsed


def show(seconds: dict[str, list[float]], pinned_bytes: dict[str, int], elements: int) -> None:
    print(f"{elements} elements, fp32 on the host to bf16 on the device, {torch.get_num_threads()} host threads")
    print(f"{'scheme':16} {'median ms':>10} {'G elements/s':>13} {'times pageable':>15} {'pinned MiB':>11}")
    for name, values in seconds.items():
        counted = values[1:]  # the first round warms up
        median = statistics.median(counted)
        pairs = zip(seconds["pageable"][1:], counted, strict=True)
        ratio = statistics.median(base / value for base, value in pairs)
        rate, pinned = elements / median / 1e9, pinned_bytes[name] / 2**20
        print(f"{name:16} {median * 1e3:10.2f} {rate:13.2f} {ratio:15.2f} {pinned:11.1f}")


if __name__ == "__main__":
    main()
