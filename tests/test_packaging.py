"""What is installed, and what says which version it is."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

import transfer

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
