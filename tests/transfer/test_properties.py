"""Any bits, any size, any chunk, any strides: worked out apart from torch's own cast."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerators.simulated import SimulatedAccelerator
from accelerators.testing import bits
from transfer import PageableTransfer, PinnedStagedTransfer
from transfer.testing import from_bits
from transfer.testing.same_bits import ROUNDING


def bf16_by_hand(pattern):
    """Round to nearest even in integers; None for a NaN, whose payload is free."""
    if pattern & 0x7FFFFFFF > 0x7F800000:
        return None
    upper, rest = pattern >> 16, pattern & 0xFFFF
    return upper + (rest > 0x8000 or (rest == 0x8000 and upper & 1))


@settings(max_examples=150, deadline=None)
@given(
    patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70),
    chunk=st.sampled_from([1, 3, 7, 64]),
    buffers=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_bf16_is_rounded_to_nearest_even(patterns, chunk, buffers, seed):
    simulated = SimulatedAccelerator(seed)
    for transfer in (
        PageableTransfer(accelerator=simulated),
        PinnedStagedTransfer(accelerator=simulated, chunk_elements=chunk, buffers=buffers),
    ):
        destination = simulated.device_empty(len(patterns), dtype=torch.bfloat16)
        transfer.copy(destination, from_bits(patterns))
        for pattern, got in zip(patterns, destination, strict=True):
            expected = bf16_by_hand(pattern)
            if expected is None:
                assert got.isnan()
            else:
                assert got.view(torch.int16).item() & 0xFFFF == expected
        transfer.close()


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@st.composite
def strided(draw, shape, dtype):
    """A tensor of this shape whose elements lie in memory in any order, with any gaps."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(1, 2)) for _ in shape]
    parent = torch.zeros([size * gap for size, gap in zip((shape[i] for i in order), gaps, strict=True)], dtype=dtype)
    view = parent[tuple(slice(None, None, gap) for gap in gaps)]
    return parent, view.permute([order.index(i) for i in range(len(shape))])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_strides_on_either_side(data):
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    dtype, source_dtype = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(FLOATS))
    _, source = data.draw(strided(shape, source_dtype))
    source.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100)
    parent, destination = data.draw(strided(shape, dtype))
    simulated = SimulatedAccelerator(data.draw(st.integers(0, 3)))
    simulated.adopt(parent)
    expected_parent = parent.clone()
    expected = expected_parent.as_strided(destination.shape, destination.stride(), destination.storage_offset())
    expected.copy_(source)
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=data.draw(st.integers(1, 40))) as transfer:
        transfer.copy(destination, source)
    assert torch.equal(bits(parent), bits(expected_parent)), "values or gaps differ from a direct copy"


def test_fp8_as_the_installed_torch_casts_it():
    simulated = SimulatedAccelerator()
    source = torch.tensor([448.0, 465.0, 1000.0, -1000.0, float("inf"), float("-inf"), float("nan"), 61439.0, 61440.0])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        destination = simulated.device_empty(9, dtype=dtype)
        with PinnedStagedTransfer(accelerator=simulated, chunk_elements=4) as transfer:
            transfer.copy(destination, source)
        assert torch.equal(bits(destination), bits(source.to(dtype)))
        if torch.__version__.startswith("2.13.") and dtype is torch.float8_e4m3fn:  # older ones overflow to NaN
            assert bits(destination[:7]).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F]
        if dtype is torch.float8_e5m2:  # the same in every torch: 61440 is halfway to the next step, which is inf
            assert bits(destination).tolist() == [0x5F, 0x5F, 0x64, 0xE4, 0x7C, 0xFC, 0x7F, 0x7B, 0x7C]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(("dtype", "column"), [(torch.bfloat16, 1), (torch.float16, 2)])
def test_each_edge_of_rounding_alone_and_sixty_seven_times(chunk, dtype, column):
    simulated = SimulatedAccelerator()
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=chunk) as transfer:
        for row in ROUNDING:
            for copies in (1, 67):
                destination = simulated.device_empty(copies, dtype=dtype)
                transfer.copy(destination, from_bits([row[0]] * copies))
                assert {value & 0xFFFF for value in destination.view(torch.int16).tolist()} == {row[column]}


def test_never_by_way_of_another_dtype():
    simulated = SimulatedAccelerator()
    with PinnedStagedTransfer(accelerator=simulated, chunk_elements=2) as transfer:
        for value, source_dtype, dtype, expected in (
            (1.01171875, torch.float32, torch.bfloat16, 1.015625),
            (1e5, torch.float32, torch.bfloat16, 99840.0),  # by way of fp16 it would be inf
            (3.3895e38, torch.bfloat16, torch.float16, float("inf")),
            (3.140625, torch.float16, torch.bfloat16, 3.140625),
            (65504.0, torch.float16, torch.bfloat16, 65536.0),
        ):
            destination = simulated.device_empty(1, dtype=dtype)
            transfer.copy(destination, torch.tensor([value], dtype=torch.float64).to(source_dtype))
            assert destination.item() == expected
