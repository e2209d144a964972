"""Code of a user's in the middle of a step sees, and leaves, what it does with DeepSpeed alone: real ZeRO-3."""

import json

import pytest

from tests.running import run_python
from tests.zero3.interfering import UNKNOWN
from tests.zero3.launching import READY

# One launch trains all kinds, each with and without.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("interfering") / "results.json"
    done = run_python("-m", "tests.zero3.interfering", out, forked=True, prepared=READY, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", ["none", "scheduled step", *UNKNOWN])
def test_what_it_sees_and_the_weights_are_those_of_deepspeed(trained, kind):
    alone, attached = trained[kind]
    assert attached["seen"] == alone["seen"]
    assert attached["partitions"] == alone["partitions"]
    assert attached["copies"] == 8, "four sub-groups, two steps"
    assert bool(alone["seen"]) == (kind in UNKNOWN)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_it_makes_each_copy_back_wait_and_is_named(trained, kind):
    attached = trained[kind][1]
    assert attached["waited"] == 8
    (level, message), *more = [each for each in attached["said"] if "waits at once" in each[1]]
    assert not more, "once"
    assert level == "INFO"
    name = {"pre-hook": "a step pre-hook of AdamW", "pre-hook of all": "a step pre-hook of all", "mode": "mode Mode"}
    assert name.get(kind, "interfering.py:") in message


@pytest.mark.parametrize("kind", ["none", "scheduled step"])
def test_deepspeeds_and_torchs_own_code_lets_copies_run_on(trained, kind):
    attached = trained[kind][1]
    assert attached["waited"] == 0
    assert not [each for each in attached["said"] if "waits at once" in each[1]]
