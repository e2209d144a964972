"""What a user would pick instead, each in processes of its own: a worker for ``turns.take_turns``.

Equal among them are the model, batch, sequence, threads, the optimizer's settings and the clipping. Those of DeepSpeed
have the same first values and tokens too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import zero3
from ...accelerator_choice import AcceleratorChoice
from ...config import Zero3Config
from ...config_file import resolve_config
from ...errors import StrategyUnavailableError
from ..measuring.hardware import describe
from ..measuring.ranks import Ranks
from . import nvme_peers
from .engine import CLIPPING_NORM, LEARNING_RATE, describe_engine, make_engine, start_deepspeed
from .on_nvme import masters
from .phases import Phases, timed
from .rows import ALL, HALF, IN_MEMORY, OURS
from .transformer import VOCABULARY, Transformer
from .turns import Turns

PARAM, PARAM_OURS = "offload_param", "offload_param, default"
SUPER, FSDP2 = "superoffload", "fsdp2"
_ATTACHED = (OURS, PARAM_OURS, HALF, ALL, IN_MEMORY)
_WARM_UP = 2  #: Iterations, by deterministic algorithms; masters are compared after them.


def measure(options: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Makes one peer's model, and one iteration whenever it has its turn.

    Returns:
        ``phases_by_rank``, ``digests`` of every rank's masters, ``host`` (bytes) and ``parameters``; or ``reason``,
        where the peer cannot run here.
    """
    turns = Turns(options["turns"])
    accelerator = AcceleratorChoice(options["accelerator"]).resolve()
    before, phases = _resident()["now"], list[Phases]()
    torch.manual_seed(0)
    turns.next()
    try:
        training = (_fsdp2 if options["peer"] == FSDP2 else _deepspeed)(options, accelerator)
    except StrategyUnavailableError as error:
        return {"reason": str(error)}
    with _deterministic():
        for _ in range(_WARM_UP + (options["nvme"] is not None)):  # state passes from the second one on
            timed(training.forward, training.backward, training.step, ranks, accelerator)
    digest = training.digest()
    turns.done()
    while turns.next():
        phases.append(timed(training.forward, training.backward, training.step, ranks, accelerator))
        turns.done()
    own = {**_resident(), "before": before, "pinned": _pinned(accelerator)}
    result = {
        "phases_by_rank": ranks.gather([list(each) for each in phases]),
        "digests": ranks.gather(digest),
        "host_bytes_by_rank": ranks.gather(own),
        "parameters": training.parameters,
        "note": training.note,
        "engine": training.engine,
        "hardware": describe(accelerator),
    }
    training.close()
    return result


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """A block in which the same iteration has the same bits.

    Attention is computed by matrix products: of the faster ways, DeepSpeed's own gradients differ from run to run, also
    where torch is asked for deterministic algorithms (torch 2.11 on an H200, sequences of 2,048).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


class _Training:
    """One model, and the three phases of its iteration."""

    def __init__(
        self,
        forward: Callable[[], Any],
        backward: Callable[[Any], Any],
        step: Callable[[], Any],
        digest: Callable[[], str | None],
        parameters: int,
        close: Callable[[], None],
        note: str | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self.forward, self.backward, self.step, self.digest = forward, backward, step, digest
        self.parameters, self.close, self.note, self.engine = parameters, close, note, engine


def _deepspeed(options: Mapping[str, Any], accelerator: Any) -> _Training:
    peer = options["peer"]
    if peer == SUPER:
        if accelerator.name != "cuda":
            raise StrategyUnavailableError("DeepSpeed's SuperOffload runs on CUDA alone.")
        from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

        if "super_offload" not in DeepSpeedZeroOffloadOptimizerConfig.model_fields:
            raise StrategyUnavailableError("This version of DeepSpeed has no SuperOffload.")
        if options["optimizer"] != "cpu_adam":
            raise StrategyUnavailableError("SuperOffload works with DeepSpeed's CPU Adam alone.")
    start_deepspeed(accelerator)
    kind = {"offload_param": peer in (PARAM, PARAM_OURS), "super_offload": peer == SUPER}
    engine = make_engine({**options, **kind, **nvme_peers.options_of(options)}, accelerator)
    if peer in _ATTACHED:
        config = resolve_config(options["config"])
        resident = nvme_peers.host_memory(peer, describe_engine(engine)["master_bytes"])
        zero3.attach(engine, config.model_copy(update={"zero3": Zero3Config(host_memory=resident)}))
    tokens = torch.randint(VOCABULARY, (options["batch"], options["sequence"]), device=engine.device)

    def digest() -> str:
        zero3.flush(engine)
        found = hashlib.sha256()
        for master in masters(engine.optimizer):
            found.update(master.detach().contiguous().view(torch.uint8).numpy())
        return found.hexdigest()

    count = sum(parameter.ds_numel for parameter in engine.module.parameters())
    description = describe_engine(engine)
    return _Training(
        lambda: engine(tokens), engine.backward, engine.step, digest, count, engine.destroy, engine=description
    )


def _fsdp2(options: Mapping[str, Any], accelerator: Any) -> _Training:
    try:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise StrategyUnavailableError("This version of torch has no FSDP2 (fully_shard).") from None
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cpu" if accelerator.name in ("cpu", "simulated") else accelerator.name
    rank = int(os.environ["LOCAL_RANK"])
    offload: dict[str, Any] = {}
    note: str | None = "plain FSDP2 on the CPU, as there is no device to offload from"
    # gloo too: the norm of gradients that are on the host is reduced there.
    backend = "gloo"
    if kind != "cpu":
        note, offload = None, {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
        torch.get_device_module(kind).set_device(rank)
        backend = f"cpu:gloo,{kind}:{torch.distributed.get_default_backend_for_device(kind)}"
    torch.distributed.init_process_group(backend)
    mesh = init_device_mesh(kind, (options["ranks"],))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = Transformer(options["layers"], options["hidden"])
    count = sum(parameter.numel() for parameter in model.parameters())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, **offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, **offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    tokens = torch.randint(VOCABULARY, (options["batch"], options["sequence"]), device=kind)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def close() -> None:
        torch.distributed.barrier()

    return _Training(lambda: model(tokens), lambda loss: loss.backward(), step, lambda: None, count, close, note)


def _resident() -> dict[str, int]:
    """Bytes of this process that are in memory: now, and at most so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    with contextlib.suppress(OSError), Path("/proc/self/statm").open() as file:
        now = int(file.read().split()[1]) * resource.getpagesize()
    return {"now": now, "peak": peak}


def _pinned(accelerator: Any) -> int | None:
    """Bytes that torch's allocator of pinned memory holds; None where it does not say."""
    stats = getattr(getattr(torch, accelerator.name, None), "host_memory_stats", None)
    value = None if stats is None else stats().get("allocated_bytes.current")
    return None if value is None else int(value)
