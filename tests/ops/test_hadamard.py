import pytest
import torch

from klformer.ops.hadamard import hadamard_transform, next_power_of_two


def sylvester(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_equals_the_matrix(size):
    x = torch.randn(3, 5, size, dtype=torch.float64)
    torch.testing.assert_close(hadamard_transform(x), x @ sylvester(size), atol=1e-12, rtol=1e-12)


def test_is_its_own_inverse_up_to_the_size():
    x = torch.randn(7, 32, dtype=torch.float64)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)) / 32, x)


def test_gradient():
    assert torch.autograd.gradcheck(hadamard_transform, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("size", [0, 3, 12])
def test_refuses_other_sizes(size):
    with pytest.raises(ValueError, match="power of two"):
        hadamard_transform(torch.zeros(2, size))


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 8, 9, 64, 65)] == [1, 2, 4, 8, 16, 64, 128]
