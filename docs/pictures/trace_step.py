"""Records what one training iteration does when: under DeepSpeed alone, and with this package.

Trains the transformer of ``h2d bench zero3`` under ZeRO-3 on one GPU, under torch's profiler, and keeps of its trace
when four things were busy. ``draw_timeline.py`` makes a picture of it::

    python docs/pictures/trace_step.py docs/pictures/iteration_h200.json --parameters 1e9 --threads 12
    python docs/pictures/draw_timeline.py docs/pictures/iteration_h200.json docs/pictures/timeline.png
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Spans = list[tuple[float, float]]

#: Of the CPU Adam updates in a trace.
UPDATE = "cpu_adam"
#: What casts and scales on the host, outside the updates.
_CASTS = re.compile(r"aten::(copy_|_to_copy|mul_|mul|add_|div_)$")
_LINK = re.compile(r"Memcpy (HtoD|DtoH)")
#: Casts that take less, in microseconds, are those of small tensors, or only queue work for the device.
_SHORT_CAST = 200.0
#: Spans that are nearer than this are one, in microseconds: more is not seen in a picture.
_GAP = 50.0


def merged(spans: Iterable[tuple[float, float]], gap: float = 0.0) -> Spans:
    """The same as few spans, in order; those with at most ``gap`` between them are one."""
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1] + gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def without(spans: Spans, holes: Spans) -> Spans:
    """What of merged ``spans`` is in none of the merged ``holes``."""
    result: Spans = []
    for begin, end in spans:
        for hole_begin, hole_end in holes:
            if hole_end <= begin or hole_begin >= end:
                continue
            if hole_begin > begin:
                result.append((begin, hole_begin))
            begin = hole_end
            if begin >= end:
                break
        if begin < end:
            result.append((begin, end))
    return result


def lanes_of(events: Iterable[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """When each lane was busy, from the events of a Chrome trace.

    Returns:
        For ``adam``, ``cast``, ``link`` and ``device``, spans of begin and duration in milliseconds after the first
        event of the iteration. ``adam`` and ``cast`` are the host's work, ``link`` has copies in either direction.
    """
    found: dict[str, Spans] = {"adam": [], "casts": [], "calls": [], "link": [], "kernels": [], "iteration": []}
    for event in events:
        if event.get("ph") != "X":
            continue
        name, kind = event["name"], event.get("cat", "")
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if kind == "user_annotation" and name == "iteration":
            found["iteration"].append(span)
        elif kind == "user_annotation" and name == UPDATE:
            found["adam"].append(span)
        elif kind == "cpu_op" and _CASTS.match(name):
            found["casts"].append(span)
        elif kind in ("cuda_runtime", "cuda_driver"):
            found["calls"].append(span)
        elif (kind == "gpu_memcpy" and _LINK.match(name)) or (kind == "gpu_user_annotation" and name[:4] == "h2d/"):
            found["link"].append(span)
        elif kind == "kernel":
            found["kernels"].append(span)
    if not found["iteration"]:
        raise ValueError("the trace has no range `iteration`")
    zero = min(begin for begin, _ in found["iteration"])
    adam, link = merged(found["adam"]), merged(found["link"])
    # The host waits for the device, or queues work, in calls of the driver; the device reads memory of the host in
    # kernels of a range `h2d/...`, which are copies.
    casts = without(merged(found["casts"]), merged([*found["calls"], *adam]))
    lanes = {
        "adam": adam,
        "cast": [(begin, end) for begin, end in casts if end - begin >= _SHORT_CAST],
        "link": link,
        "device": without(merged(found["kernels"]), link),
    }
    return {name: [_milliseconds(span, zero) for span in merged(spans, _GAP)] for name, spans in lanes.items()}


def _milliseconds(span: tuple[float, float], zero: float) -> list[float]:
    begin, end = span
    return [round((begin - zero) / 1e3, 3), round((end - begin) / 1e3, 3)]


def record(iterate: Callable[[], object], optimizer: Any, accelerator: Any) -> dict[str, Any]:
    """Runs one iteration under torch's profiler; returns its seconds and lanes."""
    import torch

    from transfer.zero3 import known_code
    from transfer.zero3.stage3.cpu_adam import replacing_op

    # Else each copy-back would wait: what is not known might read or change partitions. This only marks a range.
    known_code.PACKAGES.add(__name__)

    def update(original: Callable[..., Any], *arguments: Any) -> Any:
        with torch.profiler.record_function(UPDATE):
            return original(*arguments)

    accelerator.synchronize()
    with (
        torch.profiler.profile() as profile,
        replacing_op(optimizer, update),
        torch.profiler.record_function("iteration"),
    ):
        iterate()
        accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    (whole,) = (event for event in events if event.get("name") == "iteration" and event.get("cat") == "user_annotation")
    return {"milliseconds": round(whole["dur"] / 1e3, 3), "lanes": lanes_of(events)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both iterations, each after three others that warm up."""
    import logging

    import torch

    from transfer import zero3
    from transfer.accelerator_choice import AcceleratorChoice
    from transfer.cli.bench_zero3.engine import make_engine, start_deepspeed
    from transfer.cli.bench_zero3.transformer import VOCABULARY, shape_of
    from transfer.cli.measuring.hardware import describe

    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("transfer").setLevel(logging.INFO)  # it says so where copies wait, or gradients go the old way
    torch.set_num_threads(options.threads)
    accelerator = AcceleratorChoice(options.accelerator).resolve()
    start_deepspeed(accelerator)
    layers, hidden = shape_of(int(float(options.parameters)))
    engine = make_engine(
        {
            "batch": 1,
            "layers": layers,
            "hidden": hidden,
            "sub_groups": 4,
            "optimizer": "cpu_adam",
            "nvme": None,
        },
        accelerator,
    )
    tokens = torch.randint(VOCABULARY, (1, options.sequence), device=engine.device)

    def iterate() -> None:
        engine.backward(engine(tokens))
        engine.step()

    recorded = {}
    for name in ("DeepSpeed alone", "with this package"):
        if name == "with this package":
            transfer = zero3.attach(engine)
        for _ in range(3):
            iterate()
        recorded[name] = record(iterate, engine.optimizer.optimizer, accelerator)
    copies = {name: each.copies for name, each in transfer.stats().items() if each.copies}
    parameters = sum(parameter.ds_numel for parameter in engine.module.parameters())
    engine.destroy()
    return {
        "schema": 1,
        "hardware": describe(accelerator),
        "parameters": parameters,
        "tokens": options.sequence,
        "copies": copies,
        "iterations": recorded,
    }


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--parameters", default="1e9", metavar="N")
    parser.add_argument("--sequence", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=12, metavar="N")
    parser.add_argument("--accelerator", help="default: what DeepSpeed chooses")
    options = parser.parse_args()
    # One process needs no launcher: these are what a launcher would set.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(options.threads),
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    options.output.write_text(json.dumps(measure(options)) + "\n")
    print(f"{options.output}: {options.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
