"""The configuration that would apply: its mistakes, and what of it keeps copies from being served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...schema.environment import ENVIRONMENT_VARIABLE, environment_path
from ..configurations import Checked, check
from .finding import Finding, no, note, ok


def look(given: str | None) -> tuple[Checked | None, list[Finding]]:
    """The file that was given, else the environment's; and what was found in it."""
    path = given or environment_path()
    if not path:
        return None, [ok("configuration", "none given, so the defaults apply; `--config` looks at a file")]
    what = "--config" if given else f"${ENVIRONMENT_VARIABLE}"
    checked = check(path)
    findings = [
        no("configuration", f"{what}: {problem}", "no mistakes", "`h2d validate` tells the mistakes alone.")
        for problem in checked.problems
    ] or [ok("configuration", f"{what}: {checked.kind}, no mistakes")]
    findings += [ok("configuration", text) for text in checked.notes[-1:] if checked.deepspeed]
    findings += [
        no("served", text, "ZeRO-3 with `offload_optimizer`", "Change the DeepSpeed config, if that is meant.")
        if text.endswith(("only stage 3 is served.", "nothing is copied back."))
        else note("served", text, "copy-backs that run on behind CPU Adam", "Leave it out, if you can do without.")
        for text in checked.notes
        if text not in checked.notes[-1:] and not text.startswith("It has no key")
    ]
    return checked, [*findings, *_aio(checked.deepspeed)]


def _aio(config: Mapping[str, Any]) -> Iterator[Finding]:
    """DeepSpeed's setting for reads and writes that this package leaves to it."""
    zero, aio = config.get("zero_optimization"), config.get("aio")
    sections = [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, Mapping) else []
    if not any(isinstance(each, Mapping) and each.get("device") == "nvme" for each in sections):
        return
    threads = aio.get("intra_op_parallelism", 1) if isinstance(aio, Mapping) else 1
    if threads in (1, "1"):
        yield note(
            "aio",
            "`aio.intra_op_parallelism` is 1, DeepSpeed's default: one thread for each read and write",
            "4 or more",
            'Write `"aio": {"intra_op_parallelism": 8}` for what DeepSpeed itself reads and writes.',
        )
    else:
        yield ok("aio", f"`aio.intra_op_parallelism` is {threads}")
