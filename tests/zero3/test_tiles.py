"""CPU Adam in tiles: the bits of one call, and only where no other code looks at the result in between."""

import types

import deepspeed
import pytest
import torch

from transfer.zero3 import tiles
from transfer.zero3.stage3 import updates_in_parts
from transfer.zero3.tiles import TileStream, plan_tiles

TILE = 256


@pytest.fixture
def stream(monkeypatch):
    """Updates in tiles of 256 elements."""
    monkeypatch.setattr(tiles, "ALIGNMENT_ELEMENTS", 128)
    return TileStream(TILE + 100)


def test_tiles_are_equal_but_for_the_last():
    assert list(plan_tiles(10 * 2**16 + 1, 2**18)) == [(0, 2**18), (2**18, 2**18), (2**19, 2 * 2**16 + 1)]
    assert list(plan_tiles(2**18, 2**18)) == [(0, 2**18)]
    assert list(plan_tiles(2**18 + 7, 3 * 2**16 + 5)) == [(0, 3 * 2**16), (3 * 2**16, 2**16 + 7)]
    assert list(plan_tiles(100, 5)) == [(0, 100)], "not less than the alignment"
    assert list(plan_tiles(0, 5)) == [(0, 0)]


@pytest.mark.parametrize("numel", [1, 2**21, 2**22, 2**22 + 1, 10**7 + 3, 2**31 + 7])
def test_tiles_cover_everything_once_and_begin_at_whole_vectors(numel):
    end = 0
    for offset, length in plan_tiles(numel, 2**22):
        assert offset == end
        assert offset % 2**16 == 0
        assert 0 < length <= 2**22
        end = offset + length
    assert end == numel


@pytest.mark.parametrize("numel", [1, 127, 128, 500, 4096, 10_007])
@pytest.mark.parametrize("adamw", [True, False])
def test_the_bits_are_those_of_one_call(cpu_adam, stream, numel, adamw):
    def train_in(*, cut):
        generator = torch.Generator().manual_seed(3)
        # Two sub-groups of one optimizer, as ZeRO-3 gives it one after the other.
        groups = [torch.nn.Parameter(torch.randn(numel, generator=generator)) for _ in range(2)]
        optimizer = cpu_adam(groups, lr=0.01, weight_decay=0.1, adamw_mode=adamw)
        submitted = []
        for _ in range(25):  # enough for the powers of both betas to depend on how they are computed
            for group in groups:
                group.grad = torch.randn(numel, generator=generator)
                optimizer.param_groups[0]["params"] = [group]
                if cut:
                    assert updates_in_parts(optimizer)
                    with stream.updating(optimizer, group.data, lambda *tile: submitted.append(tile), 1):
                        optimizer.step()
                else:
                    optimizer.step()
        state = [optimizer.state[group][key] for group in groups for key in ("exp_avg", "exp_avg_sq")]
        return [*(group.data for group in groups), *state], submitted

    whole, _ = train_in(cut=False)
    tiled, submitted = train_in(cut=True)
    assert all(torch.equal(*pair) for pair in zip(tiled, whole, strict=True))
    planned = list(plan_tiles(numel, TILE))
    assert submitted[: len(planned)] == planned
    assert len(submitted) == 50 * len(planned)


def test_each_tile_is_submitted_once_it_has_its_new_values(cpu_adam, stream):
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.ones(1000)
    optimizer = cpu_adam([parameter], lr=1.0)
    changed = []

    def submit(offset, length):
        assert parameter.data[offset : offset + length].ne(0).all()
        changed.append(int(parameter.data.ne(0).sum()))

    with stream.updating(optimizer, parameter.data, submit, 1):
        optimizer.step()
    assert changed == [256, 512, 768, 1000], "what comes later is still old"
    before = parameter.data.clone()
    optimizer.step()
    assert len(changed) == 4, "outside the block it is DeepSpeed's own op again"
    assert parameter.data.ne(before).all()


def test_another_tensor_is_updated_whole(cpu_adam, stream):
    parameter, other = torch.nn.Parameter(torch.zeros(1000)), torch.zeros(1000)
    parameter.grad = torch.ones(1000)
    optimizer = cpu_adam([parameter], lr=1.0)
    with stream.updating(optimizer, other, lambda *_: pytest.fail("not this tensor"), 1):
        optimizer.step()
    assert parameter.data.ne(0).all()


def test_only_deepspeeds_own_adam_is_cut(cpu_adam, monkeypatch):
    def fresh(cls=cpu_adam):
        return cls([torch.nn.Parameter(torch.zeros(4))])

    class Subclass(cpu_adam):
        pass

    assert updates_in_parts(fresh())
    assert not updates_in_parts(fresh(Subclass))
    assert not updates_in_parts(fresh(torch.optim.AdamW))
    assert not updates_in_parts(None)
    # Before 0.19.3 the op's state moves on with each update.
    for version, expected in (("0.18.9", False), ("0.19.3+cpu", True), ("0.19.9rc1", True), ("unknown", False)):
        monkeypatch.setattr(deepspeed, "__version__", version)
        assert updates_in_parts(fresh()) is expected


def test_a_submit_that_fails_leaves_the_whole_master_updated_once(cpu_adam, stream):
    def update(submit):
        parameter = torch.nn.Parameter(torch.zeros(1000))
        parameter.grad = torch.linspace(-1, 1, 1000)
        optimizer = cpu_adam([parameter], lr=1.0)
        with stream.updating(optimizer, parameter.data, submit, 1):
            optimizer.step()
        return parameter

    def refuse(offset, length):
        if offset:
            raise MemoryError("no stream")

    whole = update(lambda *_: None).data
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.linspace(-1, 1, 1000)
    optimizer = cpu_adam([parameter], lr=1.0)
    with pytest.raises(MemoryError), stream.updating(optimizer, parameter.data, refuse, 1):
        optimizer.step()
    assert torch.equal(parameter.data, whole)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_ctrl_c_while_a_tile_is_updated_leaves_the_whole_master_updated_once(stream, stopped):
    """Python raises it when the op, which is compiled, has returned: that tile is updated then."""
    calls = []

    def adam_update(parameter, *_):
        parameter.add_(1)
        calls.append(parameter.numel())
        if len(calls) == stopped + 1:
            raise KeyboardInterrupt

    parameter, *others = (torch.zeros(1000) for _ in range(4))
    optimizer = types.SimpleNamespace(ds_opt_adam=types.SimpleNamespace(adam_update=adam_update))
    with pytest.raises(KeyboardInterrupt), stream.updating(optimizer, parameter, lambda *_: None, 1):
        optimizer.ds_opt_adam.adam_update(parameter, *others)
    assert parameter.unique().tolist() == [1]
    assert sum(calls) == 1000


@pytest.mark.parametrize(
    ("numel", "most", "copies"),
    [
        (8 * 256, 10**9, [1024, 512, 256, 256]),  # halves of what is left, in whole tiles
        (8 * 256, 512, [512, 512, 512, 256, 256]),
        (8 * 256 + 3, 600, [768, 768, 512, 3]),
        (100, 10**9, [100]),
        (3 * 256, 1, [256] * 3),
    ],
)
def test_copies_are_few_and_the_last_ones_small(stream, numel, most, copies):
    parameter, *others = (torch.zeros(numel) for _ in range(4))
    op = types.SimpleNamespace(adam_update=lambda parameter, *_: parameter.add_(1))
    optimizer, submitted = types.SimpleNamespace(ds_opt_adam=op), []

    def submit(offset, length):
        assert parameter[: offset + length].eq(1).all(), "updated before"
        submitted.append((offset, length))

    with stream.updating(optimizer, parameter, submit, most):
        optimizer.ds_opt_adam.adam_update(parameter, *others)
    assert [length for _, length in submitted] == copies
    assert [offset for offset, _ in submitted] == [sum(copies[:index]) for index in range(len(copies))]
