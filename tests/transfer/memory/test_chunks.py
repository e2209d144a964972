"""The plan of a copy, also for sizes that no test machine holds."""

import itertools

import pytest
import torch

from transfer import plan_chunks
from transfer.memory.chunks import cut_at, paired_chunks


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


def cut(shape, at, chunk=1000):
    """The source elements of each piece, after cuts before these elements; and that the pieces belong together."""
    source = torch.arange(float(torch.Size(shape).numel())).view(shape)
    destination = torch.full(shape, -1.0)
    addresses = [source.data_ptr() + 4 * element for element in at]
    pieces = list(cut_at(paired_chunks(destination, source, chunk), addresses))
    for target, piece in pieces:
        assert target.shape == piece.shape
        target.copy_(piece)
    assert torch.equal(destination, source)
    return [piece.flatten().int().tolist() for _, piece in pieces]


@pytest.mark.parametrize(
    ("at", "lengths"),
    [
        ([], [10]),
        ([3], [3, 7]),
        ([1, 9], [1, 8, 1]),
        ([2, 3, 7], [2, 1, 4, 3]),
        ([0, 10], [10]),  # at an edge there is nothing to cut
        ([-4, 14], [10]),  # nor outside
    ],
)
def test_a_flat_chunk_is_cut_at_addresses(at, lengths):
    pieces = cut((10,), at)
    assert [len(piece) for piece in pieces] == lengths
    assert list(itertools.chain(*pieces)) == list(range(10))


def test_each_cut_falls_into_the_chunk_that_has_it():
    assert [len(piece) for piece in cut((10,), [2, 4, 7], chunk=4)] == [2, 2, 3, 1, 2]


def two_dimensional(at):
    """As ``cut``, of a (4, 5) source whose destination has no flat view."""
    source = torch.arange(20.0).view(4, 5)
    parent = torch.full((4, 6), -1.0)
    addresses = [source.data_ptr() + 4 * element for element in at]
    pieces = list(cut_at(paired_chunks(parent[:, :5], source, 1000), addresses))
    for target, piece in pieces:
        assert target.shape == piece.shape
        target.copy_(piece)
    assert torch.equal(parent[:, :5], source)
    assert (parent[:, 5] == -1).all()
    return [tuple(piece.shape) for _, piece in pieces], [piece.flatten().int().tolist() for _, piece in pieces]


@pytest.mark.parametrize(
    ("at", "shapes"),
    [
        ([10], [(2, 5), (2, 5)]),
        ([12], [(2, 5), (2,), (3,), (1, 5)]),  # inside the third row
        ([3], [(3,), (2,), (3, 5)]),  # inside the first
        ([19], [(3, 5), (4,), (1,)]),  # inside the last
        ([11, 13], [(2, 5), (1,), (2,), (2,), (1, 5)]),  # twice inside one row
        ([5, 12, 15], [(1, 5), (1, 5), (2,), (3,), (1, 5)]),
    ],
)
def test_rows_are_cut_at_addresses(at, shapes):
    got, pieces = two_dimensional(at)
    assert got == shapes
    assert list(itertools.chain(*pieces)) == list(range(20))
    starts = [piece[0] for piece in pieces]
    assert set(at) <= set(starts)


@pytest.mark.parametrize("at", [[7], [1, 2, 3], [12, 13], [23], [4, 8, 12, 16, 20], list(range(24))])
@pytest.mark.parametrize("chunk", [1, 5, 7, 24])
def test_three_dimensions_are_covered_once_and_no_piece_spans_a_cut(at, chunk):
    source = torch.arange(24.0).view(2, 3, 4)
    destination = torch.zeros(24).view(4, 3, 2).permute(2, 1, 0)
    addresses = [source.data_ptr() + 4 * element for element in at]
    for target, piece in cut_at(paired_chunks(destination, source, chunk), addresses):
        assert target.shape == piece.shape
        begin = int(piece.flatten()[0])
        assert not [each for each in at if begin < each < begin + piece.numel()]
        target += piece + 1
    assert torch.equal(destination, source + 1)
