"""DeepSpeed's CPU Adam, compiled in a step that people see, before several ranks want it at once.

As a program, ``python -m transfer.cli.measuring.cpu_adam``, it compiles and prints the directory alone on the
standard output: a value for ``TORCH_EXTENSIONS_DIR``.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_NAME = "cpu_adam"
_PROGRAM = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)"


def extensions_directory() -> Path:
    """Where torch keeps what it compiles for DeepSpeed.

    ``$TORCH_EXTENSIONS_DIR`` if it is set. Else a directory inside the Python environment, one for each version
    of torch and DeepSpeed: what was compiled for other versions may not load.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    versions = "-".join(f"{name}-{importlib.metadata.version(name)}" for name in ("torch", "deepspeed"))
    return Path(sys.prefix, "torch_extensions", versions)


def environment() -> dict[str, str]:
    """What a process that uses CPU Adam needs in its environment to find it compiled."""
    return {
        "TORCH_EXTENSIONS_DIR": str(extensions_directory()),
        # ninja lies beside the interpreter, which is not on PATH where the environment is not activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def compile_once(say: Callable[[str], None]) -> str | None:
    """Compiles CPU Adam unless it is there; ``say`` is called first, as that takes one to three minutes.

    Returns:
        Why CPU Adam cannot be used, as one sentence, or None if it can.
    """
    directory = extensions_directory()
    lock = directory / _NAME / "lock"
    if lock.exists():  # torch would wait for it without a limit
        return f"CPU Adam is being compiled, or its compiler was killed: if nothing compiles now, delete {lock}."
    if (directory / _NAME / f"{_NAME}.so").exists():
        return None
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"There is no C++ compiler here ({compiler} is not on PATH), and DeepSpeed's CPU Adam needs one."
    say(f"Compiling DeepSpeed's CPU Adam, once for this environment: one to three minutes. It stays in {directory}.")
    command, variables = [sys.executable, "-c", _PROGRAM], {**os.environ, **environment()}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"DeepSpeed's CPU Adam does not compile here ({last[:200]})."


def _main() -> int:
    reason = compile_once(lambda sentence: print(sentence, file=sys.stderr, flush=True))
    if reason is not None:
        print(reason, file=sys.stderr)
    print(extensions_directory())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
