"""Names, factories and plug-ins: every mistake gives one clear error that names it."""

import os
import subprocess
import sys
import textwrap

import pytest

import accelerators
from accelerators import (
    AcceleratorError,
    AcceleratorRegistrationError,
    AcceleratorUnavailableError,
    InvalidAcceleratorError,
    UnknownAcceleratorError,
    available_accelerators,
    get_accelerator,
    register_accelerator,
    set_accelerator,
    unregister_accelerator,
)
from accelerators.simulated import SimulatedAccelerator
from tests.running import ROOT, run_program, run_python


@pytest.fixture
def registered():
    """Registers under names that are forgotten after the test."""
    names = []

    def register(name, factory):
        register_accelerator(name, factory)
        names.append(name)

    yield register
    for name in names:
        unregister_accelerator(name)


@pytest.fixture(autouse=True)
def _follow_deepspeed_again():
    yield
    set_accelerator(None)


def test_the_factory_is_called_when_needed_and_once(registered):
    made = []
    registered("tested", lambda: made.append(1) or SimulatedAccelerator())
    assert "tested" in available_accelerators()
    assert made == []
    assert get_accelerator("tested") is get_accelerator("tested")
    assert made == [1]


def test_a_duplicate_name_is_refused_and_named(registered):
    registered("tested", SimulatedAccelerator)
    with pytest.raises(AcceleratorRegistrationError, match="'tested' is registered already"):
        register_accelerator("tested", SimulatedAccelerator)
    with pytest.raises(ValueError, match="'cuda' is registered already"):
        register_accelerator("cuda", SimulatedAccelerator)


@pytest.mark.parametrize("name", ["", "Acme", "ac me", "7up", None, 3, "tested:0"])
def test_an_unusable_name_is_refused(name):
    with pytest.raises(AcceleratorRegistrationError, match="lower-case identifier"):
        register_accelerator(name, SimulatedAccelerator)
    assert name not in available_accelerators()


def test_a_factory_that_cannot_be_called_is_refused():
    with pytest.raises(AcceleratorRegistrationError, match="'tested': the factory must be callable"):
        register_accelerator("tested", SimulatedAccelerator())
    assert "tested" not in available_accelerators()


@pytest.mark.parametrize("wrong", [None, "cuda", object(), SimulatedAccelerator])
def test_a_factory_that_returns_the_wrong_thing(registered, wrong):
    registered("tested", lambda: wrong)
    with pytest.raises(InvalidAcceleratorError, match="'tested': its factory .* returned"):
        get_accelerator("tested")


def test_missing_members_are_all_named(registered):
    class Unfinished(SimulatedAccelerator):
        def __init__(self):
            super().__init__()
            del self.Event

    class Half:
        name = "tested"
        pin_empty = is_pinned = Event = Stream = stream = current_stream = synchronize = print

    registered("unfinished", Unfinished)
    with pytest.raises(TypeError, match="it has no Event$"):
        get_accelerator("unfinished")
    registered("half", Half)
    with pytest.raises(
        InvalidAcceleratorError, match="capabilities, unavailable_reason, unpin_memory, register_host_memory"
    ):
        get_accelerator("half")


def test_a_factory_that_fails_is_an_unavailable_accelerator(registered):
    def factory():
        raise OSError("no such card")

    registered("tested", factory)
    with pytest.raises(AcceleratorUnavailableError, match="'tested'.*no such card") as caught:
        get_accelerator("tested")
    assert isinstance(caught.value.__cause__, OSError)


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(UnknownAcceleratorError, match="unknown accelerator 'CUDA'. Did you mean 'cuda'\\?"):
        get_accelerator("CUDA")
    with pytest.raises(LookupError, match="Registered: .*cpu, cuda"):
        get_accelerator("tpu")


def test_set_accelerator_takes_an_object_a_name_or_none():
    simulated = SimulatedAccelerator()
    set_accelerator(simulated)
    assert get_accelerator() is simulated
    set_accelerator("cpu")
    assert get_accelerator().name == "cpu"
    set_accelerator(None)
    from deepspeed.accelerator import get_accelerator as deepspeeds

    assert get_accelerator().name == deepspeeds()._name


def test_a_refused_set_changes_nothing():
    simulated = SimulatedAccelerator()
    set_accelerator(simulated)
    for wrong in (object(), SimulatedAccelerator):
        with pytest.raises(InvalidAcceleratorError, match="set_accelerator was given"):
            set_accelerator(wrong)
    with pytest.raises(UnknownAcceleratorError):
        set_accelerator("nowhere")
    assert get_accelerator() is simulated


def test_every_error_is_an_accelerator_error_and_a_builtin():
    for name in accelerators.__all__:
        value = getattr(accelerators, name)
        if isinstance(value, type) and issubclass(value, Exception) and value is not AcceleratorError:
            assert issubclass(value, AcceleratorError)
            assert len(value.__mro__) > 4, f"{name} derives from no builtin that a caller would catch"


def plugin(folder, distribution, lines, module=""):
    """Lays an installed distribution with entry points into ``folder``, as pip would."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[transfer.accelerators]\n{lines}\n")
    (folder / f"{distribution}.py").write_text(textwrap.dedent(module))


def test_entry_points_load_when_asked_for(tmp_path, monkeypatch):
    plugin(
        tmp_path,
        "quick",
        "quick = quick:make",
        "from accelerators.simulated import SimulatedAccelerator as make",
    )
    plugin(tmp_path, "broken", "broken = broken:make", "raise ImportError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    assert {"quick", "broken"} <= set(available_accelerators())
    assert "quick" not in sys.modules
    assert isinstance(get_accelerator("quick"), SimulatedAccelerator)
    with pytest.raises(
        AcceleratorRegistrationError, match="'broken'.*entry point 'broken:make' of broken failed: no driver"
    ):
        get_accelerator("broken")


def test_a_plug_in_that_is_installed_later_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    os.utime(tmp_path, (0, 0))  # else the two changes of the folder may have the same time
    assert "later" not in available_accelerators()
    plugin(tmp_path, "later", "later = later:make", "from accelerators.simulated import SimulatedAccelerator as make")
    assert "later" in available_accelerators()
    assert isinstance(get_accelerator("later"), SimulatedAccelerator)


def test_a_name_that_two_plug_ins_claim_is_refused(tmp_path, monkeypatch):
    for distribution in ("one", "two"):
        plugin(tmp_path, distribution, "shared = one:make")
    plugin(tmp_path, "hijack", "npu = one:make")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AcceleratorRegistrationError, match="'shared' is claimed more than once .*one, two"):
        get_accelerator("shared")
    with pytest.raises(AcceleratorRegistrationError, match="'npu' is claimed more than once .*hijack"):
        get_accelerator("npu")
    assert get_accelerator("cpu").name == "cpu"


@pytest.mark.slow
def test_the_vendor_example_as_an_installed_package(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling, which builds the example, is not installed here.")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run(
        [*install, str(ROOT / "examples" / "acme_accelerator")], check=True, timeout=120, capture_output=True
    )
    program = """
        import torch
        from accelerators import available_accelerators, get_accelerator
        from transfer import build_transfer

        assert "acme" in available_accelerators()
        acme = get_accelerator("acme")
        assert type(acme).__module__ == "acme_accelerator"
        config = {"accelerator": "acme", "strategy": "pinned_staged", "pinned_staged": {"chunk_elements": 3}}
        with build_transfer(config) as transfer:
            destination = acme.device_empty(10, dtype=torch.bfloat16)
            transfer.copy(destination, torch.arange(10.0))
            assert destination.tolist() == list(range(10))
            assert transfer.pinned_bytes == 12
        print("done")
    """
    done = run_program(program, path=[site])
    assert done.stdout == "done\n", done.stderr


@pytest.mark.slow
def test_the_vendor_examples_own_tests_pass():
    example = ROOT / "examples" / "acme_accelerator"
    done = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", str(example), path=[example], timeout=250, forked=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_require_accelerator_turns_a_skip_into_a_failure(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from accelerators.testing import AcceleratorConformance\n"
        "class TestIt(AcceleratorConformance):\n    accelerator_name = 'npu'\n"
    )

    def run(*options):
        return run_python(
            "-m", "pytest", "-q", "-p", "accelerators.pytest_plugin", *options, str(tmp_path), cwd=tmp_path, forked=True
        )

    if "passed" in (skipped := run()).stdout:
        pytest.skip("This machine has an npu.")
    assert skipped.returncode == 0
    assert "skipped" in skipped.stdout
    failed = run("--require-accelerator=npu")
    assert failed.returncode == 1
    assert "--require-accelerator=npu: The npu accelerator is not available here" in failed.stdout
    misspelt = run("--require-accelerator=cudaa")
    assert misspelt.returncode == 4
    assert "unknown; registered are " in misspelt.stderr
    assert "cpu, cuda" in misspelt.stderr
