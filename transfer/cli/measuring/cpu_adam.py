"""DeepSpeed's CPU Adam, compiled in a step that people see, before several ranks want it at once.

torch lets one process compile, which makes a file ``lock``. Others wait until it is gone, without a word and without
an end, also where the process was killed. Here a lock is waited for while somebody compiles.

As a program, ``python -m transfer.cli.measuring.cpu_adam``, it compiles and prints the directory alone on the
standard output: a value for ``TORCH_EXTENSIONS_DIR``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_NAME = "cpu_adam"
#: How long compiling may take, here or in another process.
_MOST_SECONDS = 1800.0
#: How long a lock stays while no compiler runs: before one starts, and while the result is loaded.
_GRACE_SECONDS = 2.0
#: Where the system does not tell who compiles: how long a compiler may write nothing.
_QUIET_SECONDS = 300.0
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


def deepspeeds_folder() -> Path:
    """Where DeepSpeed compiles CPU Adam in this environment as it is."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(_NAME, False))


def environment() -> dict[str, str]:
    """What a process that uses CPU Adam needs in its environment to find it compiled."""
    return {"TORCH_EXTENSIONS_DIR": str(extensions_directory()), **path_of_ninja()}


def path_of_ninja() -> dict[str, str]:
    """The part of it that every process needs: torch asks ninja each time whether something is to be compiled."""
    # ninja lies beside the interpreter, which is not on PATH where the environment is not activated.
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}


def compile_once(say: Callable[[str], None], folder: Path | None = None) -> str | None:
    """Compiles CPU Adam unless it is there. Blocks for one to three minutes if it compiles.

    Where another process compiles it, blocks until that one is done, for half an hour at most. A lock that a killed
    process has left is told of within seconds.

    Args:
        say: Called with a sentence before the compiler starts, and before another one is waited for.
        folder: Where DeepSpeed is to look for it; None: in ``extensions_directory``.

    Returns:
        Why CPU Adam cannot be used, as one sentence, or None if it can.
    """
    variables = {**os.environ, **(environment() if folder is None else path_of_ninja())}
    folder = extensions_directory() / _NAME if folder is None else folder
    lock = folder / "lock"
    if not _is_released(lock, say):
        return f"CPU Adam is being compiled, or its compiler was killed: if nothing compiles now, delete {lock}."
    if (folder / f"{_NAME}.so").exists() or is_installed():
        return None
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"There is no C++ compiler here ({compiler} is not on PATH), and DeepSpeed's CPU Adam needs one."
    say(f"Compiling DeepSpeed's CPU Adam, once for this environment: one to three minutes. It stays in {folder}.")
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, check=False, timeout=_MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"CPU Adam was not compiled within {_MOST_SECONDS / 60:.0f} minutes. Delete {lock} before the next try."
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"DeepSpeed's CPU Adam does not compile here ({last[:200]})."


def _is_released(lock: Path, say: Callable[[str], None]) -> bool:
    """Waits for a lock while somebody compiles; whether it is gone."""
    began = last = time.monotonic()
    told = False
    while lock.exists():
        now = time.monotonic()
        if is_compiling(lock.parent):
            last = now
            if not told:
                say(f"Another process compiles CPU Adam in {lock.parent}: this one waits, half an hour at most.")
            told = True
        if now - last > _GRACE_SECONDS or now - began > _MOST_SECONDS:
            return False
        time.sleep(0.1)
    return True


def is_compiling(folder: Path) -> bool:
    """Whether a process works in the folder, as compilers of it do; where the system does not tell, whether one may."""
    if not Path("/proc/self/cwd").exists():
        changed = [each.stat().st_mtime for each in folder.iterdir()]
        return time.time() - max(changed, default=0.0) < _QUIET_SECONDS
    here = os.path.realpath(folder)
    for each in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            if os.readlink(each) == here:  # noqa: PTH115 - text, as the system has it
                return True
    return False


def is_installed() -> bool:
    """Whether it was compiled when DeepSpeed was installed, and nothing is to do."""
    found = importlib.util.find_spec("deepspeed")
    places = found.submodule_search_locations if found is not None else None
    return any([*Path(place).glob(f"ops/adam/{_NAME}_op*.so")] for place in places or ())


def _main() -> int:
    reason = compile_once(lambda sentence: print(sentence, file=sys.stderr, flush=True))
    if reason is not None:
        print(reason, file=sys.stderr)
    print(extensions_directory())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
