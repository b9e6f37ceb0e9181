"""How the noise vectors of one draw depend on each other. Each is N(0, I) by itself, so that estimates stay unbiased.

iid          independent
orthogonal   orthogonal in blocks of D, with norms drawn as those of Gaussian vectors: more evenly spread directions
antithetic   in pairs n and -n, for positive features: exp(n.x) is large where exp(-n.x) is small. Fourier features
             can't tell n from -n, because a cosine is even: for them it halves the number of frequencies, and doubles
             the variance of the kernel
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from klformer.checks import check_choice

Coupling = Literal["iid", "orthogonal", "antithetic"]


def check_coupling(coupling: str) -> None:
    """Raises ArgumentError unless it is one of the couplings."""
    check_choice("coupling", coupling, get_args(Coupling))


def draw_noise(target: Tensor, generator: torch.Generator | None, coupling: Coupling) -> None:
    """Fill a buffer (M, D) with M vectors that are N(0, I) each."""
    count, dim = target.shape
    if coupling == "iid":
        target.copy_(_normal((count, dim), generator))
    elif coupling == "antithetic":
        half = _normal((-(-count // 2), dim), generator)
        target.copy_(torch.cat([half, -half])[:count])
    else:
        directions = orthogonal_rows(count, dim, generator)
        # Norms of whole blocks, so that as many numbers are drawn whatever is cut off.
        norms = draw_norms((-(-count // dim) * dim,), dim, generator)[:count]
        target.copy_(directions * norms.unsqueeze(-1).to(directions.device))


def orthogonal_rows(count: int, dim: int, generator: torch.Generator | None) -> Tensor:
    """(count, dim) unit vectors, uniform each, orthogonal to each other in blocks of dim."""
    square = _normal((-(-count // dim), dim, dim), generator)
    directions, upper = torch.linalg.qr(square)
    # QR fixes signs by convention; undo it, so that the directions are uniform.
    directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return directions.transpose(-1, -2).flatten(0, 1)[:count]


def draw_signs(target: Tensor, generator: torch.Generator | None) -> None:
    """Fill a buffer with +1 and -1, equally likely."""
    target.copy_(torch.randint(0, 2, target.shape, generator=generator, device=_device(generator)) * 2 - 1)


def draw_norms(shape: tuple[int, ...], dim: int, generator: torch.Generator | None) -> Tensor:
    """Norms of independent N(0, I) vectors in R^dim: chi-distributed with dim degrees of freedom."""
    return _normal((*shape, dim), generator).norm(dim=-1)


def draw_normal(target: Tensor, generator: torch.Generator | None) -> None:
    """Fill a buffer of any shape with N(0, 1)."""
    target.copy_(_normal(tuple(target.shape), generator))


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """N(0, 1), drawn on the generator's device (the CPU if there is none)."""
    return torch.randn(*shape, generator=generator, device=_device(generator))


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device
