"""DeepSpeed's aio op: used where it is built, and never built or waited for."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch.utils.cpp_extension

from accelerators import deepspeed_aio
from tests.running import run_python

op_builder = pytest.importorskip("deepspeed.ops.op_builder", reason="DeepSpeed is not installed.")


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    """A folder without builds, in which each attempt to build fails."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    loads_with(monkeypatch, SystemExit("a build was started"))
    yield tmp_path
    deepspeed_aio.unavailable_reason.cache_clear()


def loads_with(monkeypatch, error, is_compatible=True):
    def load(self, verbose=True):
        raise error

    monkeypatch.setattr(op_builder.AsyncIOBuilder, "load", load)
    monkeypatch.setattr(op_builder.AsyncIOBuilder, "is_compatible", lambda self, verbose=True: is_compatible)


def reason():
    deepspeed_aio.unavailable_reason.cache_clear()
    return deepspeed_aio.unavailable_reason()


def built(builder, source=None):
    """A build that is there, as far as its files tell."""
    folder = Path(torch.utils.cpp_extension._get_build_directory(builder.name, False))
    assert folder.is_relative_to(os.environ["TORCH_EXTENSIONS_DIR"])
    source = source or os.path.abspath(builder.deepspeed_src_path(builder.sources()[0]))  # noqa: PTH100 - as DeepSpeed
    (folder / "build.ninja").write_text(f"build it: compile {source}")
    (folder / f"{builder.name}.so").write_text("half")
    return folder


def all_built():
    """The aio op, and the op that it needs in DeepSpeed 0.19.4 and later. Returns the file of the last one."""
    builders = [op_builder.AsyncIOBuilder()]
    try:
        from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder
    except ImportError:
        pass
    else:
        builders.append(PinMemoryBuilder())
    return [built(builder) / f"{builder.name}.so" for builder in builders][-1]


def test_nothing_is_built(extensions):
    assert "is not built" in reason()


def test_an_interrupted_build(extensions):
    folder = built(op_builder.AsyncIOBuilder())
    (folder / "lock").touch()
    os.utime(folder / "lock", (0, 0))
    assert f"delete {folder / 'lock'}" in reason()


def test_a_lock_that_another_process_holds_for_a_moment(extensions):
    """And then a build of another environment."""
    folder = built(op_builder.AsyncIOBuilder(), "/another/environment/source.cpp")
    (folder / "lock").touch()
    timer = threading.Timer(0.2, (folder / "lock").unlink)
    timer.start()
    assert "was built by another environment" in reason()
    timer.join()


def test_a_build_that_is_older_than_its_recipe(extensions):
    os.utime(all_built(), (0, 0))
    assert "was built by another environment" in reason()


def test_a_machine_without_libaio(extensions, monkeypatch):
    all_built()
    loads_with(monkeypatch, SystemExit("a build was started"), is_compatible=False)
    assert "needs libaio (package libaio-dev)" in reason()


def test_a_build_that_does_not_load(extensions, monkeypatch):
    all_built()
    loads_with(monkeypatch, ImportError("libaio.so.1: cannot open shared object file"))
    assert "ImportError: libaio.so.1: cannot open shared object file" in reason()


@pytest.mark.skipif(sys.platform != "linux", reason="The op reads by libaio, which only Linux has.")
def test_what_is_locked_already_counts():
    """For a process without the privilege to lock as much as it likes."""
    done = run_python("-c", LOCKING)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["True", "False", "True"]


LOCKING = """
import mmap, os, resource
from accelerators.deepspeed_aio import may_lock_bytes
resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**20, 2**20))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
print(may_lock_bytes(2**19))
held = mmap.mmap(-1, 3 * 2**18, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x2000)  # MAP_LOCKED
print(may_lock_bytes(2**19))
held.close()
print(may_lock_bytes(2**19))
"""
