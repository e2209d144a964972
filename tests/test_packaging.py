"""What is installed, and what says which version it is."""

import re
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import transfer
from tests.running import run_python

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
CONSTRAINTS = sorted((ROOT / ".ci").glob("constraints*.txt"))


def name(requirement):
    """The package's name as indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def needs():
    """Every requirement that pyproject.toml names."""
    build, runtime = (
        re.search(rf"^{key} = \[(.*?)\]", PROJECT, re.M | re.S)[1] for key in ("requires", "dependencies")
    )
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", PROJECT, re.M | re.S)[1]
    return re.findall(r'"([^"]+)"', build + runtime + extras)


def test_the_requirements_are_found():
    assert {name(each) for each in needs()} >= {"hatchling", "torch", "deepspeed", "matplotlib", "pytest"}


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_pin_everything_that_is_asked_for(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    pinned = [line.partition("==")[0] for line in lines]
    assert len(pinned) == len(set(pinned))
    assert {name(each) for each in needs()} - set(pinned) == set()


def test_the_floor_is_the_oldest_that_is_allowed():
    pinned = (ROOT / ".ci" / "constraints-floor.txt").read_text().splitlines()
    lower = {name(each): re.search(r">=([0-9.]+)", each)[1] for each in needs() if ">=" in each}
    for package in ("torch", "deepspeed", "pydantic", "pyyaml", "rich", "xxhash"):
        (found,) = (line.partition("==")[2] for line in pinned if line.startswith(f"{package}=="))
        assert f"{found}.".startswith(f"{lower[package]}."), package


def test_the_version_is_that_of_the_distribution():
    assert transfer.__version__ == version("host-to-device-transfer")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        transfer.no_such_name  # noqa: B018


def build(project, folder, *kinds):
    """What ``python -m build`` makes of a project, without its environment of its own, which needs a network."""
    done = run_python("-m", "hatchling", "build", *kinds, "-d", folder, cwd=project)
    assert done.returncode == 0, done.stderr[-4000:]
    return {file.suffix: file for file in folder.iterdir()}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist, and the wheel that is built from it in a folder of its own, as an index would do it."""
    if not (ROOT / ".git").exists():
        pytest.skip("It builds what a clone has, and this is no clone.")
    folder = tmp_path_factory.mktemp("distributions")
    sdist = build(ROOT, folder / "sdist", "-t", "sdist")[".gz"]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = folder.glob("host_to_device_transfer-*")
    return unpacked, build(unpacked, folder / "wheel", "-t", "wheel")[".whl"]


def modules(folder):
    return {
        path.relative_to(folder).as_posix()
        for package in ("accelerators", "transfer")
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_sdist_has_the_sources_tests_examples_and_pages(distributions):
    unpacked, _ = distributions
    assert modules(unpacked) == modules(ROOT)
    for name in ("README.md", "LICENSE", "pyproject.toml", "docs/conf.py", "tests/test_packaging.py"):
        assert (unpacked / name).is_file(), name
    assert (unpacked / "examples" / "transfer.yaml").is_file()


def test_the_wheel_has_both_packages_and_works_alone(distributions, tmp_path):
    """Its folder is the only place of these packages in a process that starts in an empty folder."""
    _, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "site")
    assert names == modules(ROOT)
    assert {"transfer/py.typed", "accelerators/py.typed"} <= names
    program = """
import sys
from importlib.metadata import distribution
site = sys.path[1]
import accelerators, torch, transfer
from accelerators.simulated import SimulatedAccelerator
assert transfer.__file__.startswith(site) and accelerators.__file__.startswith(site)
simulated = SimulatedAccelerator()
destination = simulated.device_empty(1000, dtype=torch.bfloat16)
with transfer.build_transfer({}, simulated) as copies:
    copies.copy(destination, torch.arange(1000.0))
assert destination.tolist() == torch.arange(1000.0).bfloat16().tolist()
(command,) = distribution("host-to-device-transfer").entry_points.select(name="h2d")  # of the first on the path
sys.exit(command.load()(["--version"]))
"""
    others = [path for path in sys.path if path and not (Path(path) / "transfer").is_dir()]
    environment = {"PYTHONPATH": ":".join([str(tmp_path / "site"), *others])}
    done = run_python("-c", program, environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"host-to-device-transfer {transfer.__version__}\n"
