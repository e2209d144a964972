"""Versions, what of DeepSpeed is served, compiled ops, and files that hide this package."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ...zero3 import stage3
from ..measuring import cpu_adam
from .finding import Finding, no, note, ok


def look() -> Iterator[Finding]:
    """Blocks for the seconds that importing torch and deepspeed takes."""
    import torch

    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield ok("system", f"{system}; Python {platform.python_version()}")
    try:
        yield ok("this package", importlib.metadata.version("host-to-device-transfer"))
    except importlib.metadata.PackageNotFoundError:
        remedy = "Install it, so that `h2d` and plug-ins are found."
        yield note("this package", "on the module path alone", "installed", remedy)
    yield ok("torch", str(torch.__version__))
    yield from _deepspeed()
    yield _shadow()


def _deepspeed() -> Iterator[Finding]:
    version, (first, last) = stage3.deepspeed_version(), stage3.READ
    try:
        classes = stage3.optimizer_classes()
    except ImportError as error:
        yield no("DeepSpeed", f"{version}, without {error.name}", f"{first} to {last}", "Install such a version.")
        return
    unread = stage3.unread_version()
    if unread is None:
        yield ok("DeepSpeed", f"{version}, whose step was read")
    else:
        yield note(
            "DeepSpeed", f"{version}: {unread}", f"{first} to {last}", "Copy-backs are served, and wait at once."
        )
    for each in classes:
        missing, can_serve = stage3.moved(each)
        if not missing:
            yield ok("sites", f"{each.__name__}: all that is replaced is there")
        elif can_serve:
            found = f"{each.__name__} has no {', '.join(missing)}"
            yield note("sites", found, "all sites", "Copy-backs are served, and wait at once. Please report it.")
        else:
            found = f"{each.__name__} has no {', '.join(missing)}"
            yield no("sites", found, "all sites", f"Install DeepSpeed {first} to {last}.")


def look_at_ops() -> Iterator[Finding]:
    """CPU Adam and aio, as DeepSpeed finds them; builds nothing."""
    from accelerators import deepspeed_aio

    folder = cpu_adam.deepspeeds_folder()
    if cpu_adam.is_installed():
        yield ok("CPU Adam", "compiled when DeepSpeed was installed")
    elif (folder / f"{folder.name}.so").exists():
        yield ok("CPU Adam", "compiled")
    elif shutil.which(os.environ.get("CXX", "c++")) is None:
        remedy = "Install g++. Without it, DeepSpeed's CPU Adam does not start, and torch's AdamW is slower."
        yield note("CPU Adam", "not compiled, and there is no C++ compiler", "a compiler", remedy)
    else:
        yield ok("CPU Adam", "not compiled yet; its first use compiles it, in one to three minutes")
    reason = deepspeed_aio.unavailable_reason()
    if reason is None:
        yield ok("aio", "compiled; needed for state or parameters on NVMe")
    else:
        yield ok("aio", f"{reason} It is needed for NVMe alone.")
    yield _locks(folder.parent)


def _locks(root: Path) -> Finding:
    """Files that torch leaves while it compiles. Later builds wait for them without a word and without an end."""
    held = [lock for lock in sorted(root.glob("*/lock")) if not cpu_adam.is_compiling(lock.parent)]
    if not held:
        return ok("build locks", "none that is left over")
    names = ", ".join(lock.parent.name for lock in held)
    remedy = f"Delete `lock` in these folders of {root}, unless something compiles there now."
    made = no if {"cpu_adam", "async_io"} & {lock.parent.name for lock in held} else note
    return made("build locks", f"left over by a build of: {names}", "none", remedy)


def _shadow() -> Finding:
    """Whether `import transfer` in a script that is started here finds something else."""
    for name in ("transfer", "accelerators"):
        own = Path(sys.modules[name].__file__ or "").resolve()
        places = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        spec = importlib.machinery.PathFinder.find_spec(name, places)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != own:
            found = f"{Path(spec.origin).name} of another `{name}` is found first, here or on PYTHONPATH"
            return no("import", found, f"this package's `{name}`", f"Rename or move {spec.origin}.")
    return ok("import", "no other `transfer` or `accelerators` hides this package's")
