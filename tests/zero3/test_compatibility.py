"""Configurations of ZeRO-3: each trains bit for bit what DeepSpeed trains alone, and its copies are served."""

import pytest
import torch

from tests.zero3 import compatibility
from tests.zero3.launching import run_ranks

# A launch has a time limit of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, why_no_cpu_adam):
    if why_no_cpu_adam is not None:
        pytest.skip(why_no_cpu_adam)
    out = tmp_path_factory.mktemp("compatibility")
    run_ranks(2, [compatibility.__file__, out])
    return {name: [torch.load(out / f"{name}-{rank}.pt") for rank in range(2)] for name in compatibility.CASES}


@pytest.mark.parametrize("name", compatibility.CASES)
def test_it_is_that_of_deepspeed(trained, name):
    for (alone, none), (attached, copies) in trained[name]:
        assert len(alone) == len(attached) > compatibility.STEPS
        assert all(torch.equal(*pair) for pair in zip(alone, attached, strict=True))
        assert copies > none == 0


def test_the_momentum_of_muon_is_copied_too(trained):
    for rank in range(2):
        assert trained["Muon"][rank][1][1] > trained["torch AdamW"][rank][1][1]


def test_training_did_something(trained):
    for name, ranks in trained.items():
        losses = ranks[0][0][0]
        assert not torch.equal(losses[0], losses[2]), name
    assert not torch.equal(trained["Muon"][0][0][0][-1], trained["torch SGD"][0][0][0][-1])
