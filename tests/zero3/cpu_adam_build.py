"""DeepSpeed's CPU Adam, compiled in a step of its own: no test is late because a compiler is slow."""

import contextlib
import fcntl
import functools
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

#: On two idle cores it takes one to two minutes.
COMPILE_SECONDS = 1800
PROGRAM = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)"


def use_cache():
    """Names the folder of compiled ops, by the versions that they belong to, unless the caller has named one."""
    versions = "-".join(f"{name}{importlib.metadata.version(name)}" for name in ("torch", "deepspeed"))
    default = Path("~/.cache/torch_extensions").expanduser() / versions
    return Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(default)))


def is_compiled():
    return (use_cache() / "cpu_adam" / "cpu_adam.so").exists()


def ask_the_cpu_once():
    """DeepSpeed asks py-cpuinfo for the vendor each time it makes CPU Adam; an answer takes another Python a second."""
    import cpuinfo  # type: ignore[import-untyped]

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def why_no_cpu_adam():
    """Compiles CPU Adam where that was not done, which takes minutes; returns why it cannot be, or None."""
    folder = use_cache()
    with contextlib.ExitStack() as held:
        folder.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context((folder / "compiled-by-tests.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the tests compiles, others wait; a dead one holds no lock
        if is_compiled():
            return None
        try:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM], timeout=COMPILE_SECONDS, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return (
                f"DeepSpeed's CPU Adam was not compiled within {COMPILE_SECONDS} seconds; a build that was killed "
                f"leaves a file `lock` in {folder} that later ones wait for."
            )
    if done.returncode == 0:
        return None
    return f"DeepSpeed's CPU Adam cannot be built here: {done.stderr.strip().splitlines()[-1][:200]}."
