"""The plan of a copy, also for sizes that no test machine holds."""

import pytest
import torch

from transfer import plan_chunks
from transfer.memory.chunks import paired_chunks


def test_more_than_two_to_the_31_elements():
    plan = list(plan_chunks(2**31 + 7, 2**26))
    assert len(plan) == 33
    assert plan[0] == (0, 67_108_864)
    assert plan[-1] == (2_147_483_648, 7)
    assert all(offset % 67_108_864 == 0 for offset, _ in plan)
    assert sum(length for _, length in plan) == 2_147_483_655


def test_a_real_tensor_of_that_many_elements_is_cut_without_memory():
    tensor = torch.zeros(1).expand(2**31 + 7)
    pieces = [target.numel() for target, _ in paired_chunks(tensor, tensor, 2**26)]
    assert len(pieces) == 33
    assert sum(pieces) == 2_147_483_655


@pytest.mark.parametrize(
    ("numel", "chunk", "plan"), [(0, 5, []), (5, 5, [(0, 5)]), (6, 5, [(0, 5), (5, 1)]), (1, 9, [(0, 1)])]
)
def test_small_plans(numel, chunk, plan):
    assert list(plan_chunks(numel, chunk)) == plan


@pytest.mark.parametrize("chunk", [0, -3])
def test_a_chunk_without_elements_is_refused(chunk):
    with pytest.raises(ValueError, match="at least 1"):
        list(plan_chunks(10, chunk))


@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 24, 100])
@pytest.mark.parametrize(
    "view",
    [
        lambda base: base,
        lambda base: base.transpose(0, 2),
        lambda base: base[:, ::2],
        lambda base: base[..., 1:2].expand(2, 3, 5),
        lambda base: base.unsqueeze(0).transpose(1, 3),
        lambda base: base[0, 0],
        lambda base: base[1, 2, 3],
    ],
)
def test_every_element_is_covered_once_and_no_chunk_is_too_large(view, chunk):
    source = view(torch.arange(24.0).view(2, 3, 4))
    destination = torch.zeros(24).view(4, 3, 2).permute(2, 1, 0)
    if destination.shape != source.shape:
        destination = torch.zeros(source.shape)
    for target, piece in paired_chunks(destination, source, chunk):
        assert target.shape == piece.shape
        assert target.numel() <= chunk
        target += piece + 1
    assert torch.equal(destination, source + 1)
