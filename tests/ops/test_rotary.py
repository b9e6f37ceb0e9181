"""Rotary positions: scores see differences of positions only."""

import math

import pytest
import torch

from klformer.ops.rotary import rotate

LENGTH = 11


@pytest.mark.parametrize("head_dim", [2, 5, 8])
def test_scores_depend_on_the_difference_of_positions_only(head_dim):
    q, k = torch.randn(2, head_dim, dtype=torch.float64)
    at = torch.stack([rotate(x.expand(LENGTH, -1)) for x in (q, k)])
    scores = at[0] @ at[1].T  # (position of q, position of k)
    for difference in range(-LENGTH + 1, LENGTH):
        diagonal = scores.diagonal(difference)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-12, rtol=0)
    assert (scores[0] - scores[0, 0]).abs().max() > 1e-3


def test_a_shift_of_all_positions_changes_no_score():
    q, k = torch.randn(2, 3, LENGTH, 6, dtype=torch.float64)
    here, there = (rotate(q, first) @ rotate(k, first).mT for first in (0, 1000))
    torch.testing.assert_close(here, there, atol=1e-11, rtol=0)


def test_two_channels_are_a_point_that_turns_by_one_radian_a_token():
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(4, -1)
    expected = torch.tensor([[math.cos(p), math.sin(p)] for p in range(4)], dtype=torch.float64)
    torch.testing.assert_close(rotate(x), expected, atol=1e-15, rtol=0)


def test_the_slowest_rate_is_that_of_the_definition():
    x = torch.zeros(6, dtype=torch.float64)
    x[2] = 1  # paired with channel 5
    turned = rotate(x.expand(2, -1))[1]
    angle = 10_000 ** (-4 / 6)
    torch.testing.assert_close(turned[[2, 5]], torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64))


def test_norms_and_the_last_channel_of_an_odd_size_stay():
    x = torch.randn(2, 3, LENGTH, 5, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, 7).norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=0)
    assert torch.equal(rotate(x, 7)[..., 4], x[..., 4])


def test_the_positions_go_on_from_the_first():
    x = torch.randn(2, LENGTH, 4, dtype=torch.float64)
    torch.testing.assert_close(rotate(x)[:, 6:], rotate(x[:, 6:], 6), atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_rotated_in_float32(dtype):
    x = torch.randn(3, 2000, 4).to(dtype)
    assert rotate(x).dtype == dtype
    torch.testing.assert_close(rotate(x), rotate(x.float()).to(dtype), atol=0, rtol=0)
    if dtype == torch.float32:
        torch.testing.assert_close(rotate(x).double(), rotate(x.double()), atol=1e-3, rtol=0)


def test_gradients():
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, 3), x)
