"""DeepSpeed's private names stand in one folder, and DeepSpeed has them."""

import re
import types
from pathlib import Path

import deepspeed
import pytest
from packaging.version import Version

from tests.zero3.stand_ins import engine_of
from transfer.zero3 import stage3

ROOT = Path(__file__).parents[2]
HERE = Path(stage3.__file__).parent
OTHERS = sorted(
    path for path in (ROOT / "transfer").rglob("*.py") if HERE not in path.parents and "bench_zero3" not in path.parts
)


def words(path):
    return set(re.findall(r"\w+", path.read_text()))


def test_no_other_file_knows_deepspeeds_private_names():
    known = {path.relative_to(ROOT).as_posix(): words(path) & stage3.NAMES.keys() for path in OTHERS}
    assert {path: names for path, names in known.items() if names} == {}
    assert len(OTHERS) > 50


def test_every_name_of_the_table_is_used():
    names, others = (HERE / "names.py").read_text(), [each for each in HERE.glob("*.py") if each.stem != "names"]
    used = set(re.findall(r"\w+", names.split("\nNAMES = {\n")[0])).union(*map(words, others))
    assert stage3.NAMES.keys() <= used


def test_the_installed_deepspeed_has_every_name_that_was_read_in_its_version():
    package = Path(deepspeed.__file__).parent
    sources = [*(package / "runtime").rglob("*.py"), *(package / "ops").rglob("*.py")]
    found = set().union(*(words(path) for path in sources))
    here = Version(Version(deepspeed.__version__).base_version)
    for name, (first, last) in stage3.NAMES.items():
        if Version(first) <= here <= Version(last):
            assert name in found, f"DeepSpeed {here} has no {name}"


def test_a_deepspeed_config_that_is_not_known_is_empty():
    assert stage3.deepspeed_config(engine_of(None, stage=3)) == {"stage": 3}
    assert stage3.deepspeed_config(types.SimpleNamespace(_config=None)) == {}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.19.8", "0.19.8"), ("0.19.9rc1", "0.19.9rc1"), ("0.19.3+unknown", "0.19.3+unknown"), ("unknown", "0")],
)
def test_any_version_of_deepspeed_can_be_compared(monkeypatch, version, expected):
    monkeypatch.setattr(deepspeed, "__version__", version)
    assert stage3.deepspeed_version() == Version(expected)
