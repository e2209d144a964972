"""What a failing check of the suites says: one line, with the first element that differs."""

import pytest
import torch

from accelerators.testing import check_values


def said(got, expected):
    with pytest.raises(AssertionError) as caught:
        check_values(got, expected, "pinned source")
    return str(caught.value)


def test_the_first_element_that_differs_both_values_and_how_many_do():
    got, expected = torch.tensor([[1.0, 2.5], [4.0, 5.0]]), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert said(got, expected) == "pinned source: element 1 is 2.5 (0x40200000), not 2.0 (0x40000000); 2 of 4 differ"


def test_signed_zeros_and_nans_are_told_apart_by_their_bits():
    zeros = said(torch.tensor([-0.0], dtype=torch.bfloat16), torch.tensor([0.0], dtype=torch.bfloat16))
    assert zeros == "pinned source: element 0 is -0.0 (0x8000), not 0.0 (0x0000); 1 of 1 differ"
    check_values(torch.tensor(float("nan")), torch.tensor(float("nan")), "the same NaN")


def test_shapes_and_dtypes():
    assert (
        said(torch.zeros(2), torch.zeros(3)) == "pinned source: found torch.float32 (2,), expected torch.float32 (3,)"
    )
    assert "expected torch.bfloat16 ()" in said(torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16))
    check_values(torch.empty(0, 3), torch.empty(0, 3), "nothing")


def test_views_are_compared_by_their_own_elements():
    grid = torch.arange(6.0).view(2, 3)
    check_values(grid.t(), grid.t().contiguous(), "a view")
    assert said(grid.t(), torch.zeros(3, 2)).startswith("pinned source: element 1 is 3.0")
