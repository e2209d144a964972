"""Gradients that go to the host once: everything that DeepSpeed does and tells is what it is without, bit for bit."""

import functools

import pytest
import torch

from accelerators.testing import accelerator_or_skip
from tests.zero3.gradients import training
from tests.zero3.launching import run_ranks

# A launch has a time limit of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(func_only=True)]


@pytest.fixture(scope="module")
def trained_on(tmp_path_factory):
    """Gives what was trained on ranks of one accelerator; the first test of each trains it all."""

    @functools.cache
    def train(accelerator, ranks):
        out = tmp_path_factory.mktemp("gradients")
        run_ranks(ranks, [training.__file__, out, accelerator], {"CHECKPOINTS": str(out)})

        def both(name, rank):
            files = (f"{training.trained_alone_as(name)}-{False}-{rank}.pt", f"{name}-{True}-{rank}.pt")
            return [torch.load(out / each) for each in files]

        return {name: [both(name, rank) for rank in range(ranks)] for name in training.CASES}

    return train


@pytest.fixture(scope="module", params=["simulated-2", "cuda-1", "cuda-2"])
def trained(request, trained_on, why_no_cpu_adam):
    if why_no_cpu_adam is not None:
        pytest.skip(why_no_cpu_adam)
    accelerator, ranks = request.param.split("-")
    if accelerator == "cuda":
        accelerator_or_skip("cuda", request.config)
        if torch.cuda.device_count() < int(ranks):
            pytest.skip("This machine has one GPU.")
    return trained_on(accelerator, int(ranks))


@pytest.mark.parametrize("name", training.CASES)
def test_everything_is_that_of_deepspeed(trained, name):
    for alone, attached in trained[name]:
        assert len(alone["seen"]) == len(attached["seen"]) > 10
        assert all(attached["copied"]), "each low-precision partition is the cast of its master"
        for index, ((what, expected), (_, got)) in enumerate(zip(alone["seen"], attached["seen"], strict=True)):
            assert (got is None) == (expected is None), (index, what)
            if got is not None:
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=f"{what}, {index}")


@pytest.mark.parametrize("name", training.CASES)
def test_it_was_done(trained, name):
    """The fp32 gradients are in no memory, unless somebody keeps views of them."""
    real = training.CASES[name].get("real", 0)
    for _, attached in trained[name]:
        if real is None:
            assert "lazy" not in attached
        elif real == "all":
            assert (attached["lazy"], attached["real"] > 1) == (0, True)
        else:
            assert attached["real"] == real
            assert attached["lazy"] > 0
        assert bool(attached.get("resident_bytes")) == training.CASES[name].get("resident", False)
        if "lazy" in attached:
            assert attached["buffers"] == (2 if training.CASES[name].get("micro_steps", 1) > 1 else 1)


@pytest.mark.parametrize("name", [name for name in training.CASES if name.startswith("nvme")])
def test_gradients_never_go_to_files(trained, name):
    for alone, attached in trained[name]:
        assert attached["bytes"]["written"] < alone["bytes"]["written"] * 0.99


def test_the_cases_happen(trained):
    def values(name, what):
        return [value for each, value in trained[name][0][0]["seen"] if each == what]

    for name in ("fp16, overflows", "unused layers, micro-steps, fp16, overflows"):
        assert 0 < values(name, "skipped")[0] < training.CASES[name]["steps"]
    losses = values("bf16", "loss")
    assert losses[0] > losses[-1] > 0
    assert not torch.equal(values("bf16", "weight")[0], values("bf16, no clipping", "weight")[0])
