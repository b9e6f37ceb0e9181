"""Sine and cosine of angles that are counted in turns, both at once.

torch has no function that gives both, and each of its two reduces its argument to one period anew. Counted in turns
that reduction is one rounding. With r the rest, in [-1/2, 1/2], and s, c = sin(pi r), cos(pi r):

    cos(2 pi r) = 1 - 2 s^2          sin(2 pi r) = 2 s c

s and c are minimax polynomials of r on that interval, good to 3e-9 and 5e-8: in single precision, rounding is larger.
Two thirds of the time of torch's two functions. Other precisions and devices use torch's.
"""

import torch
from torch import Tensor

#: sin(pi r) = r P(r^2) and 2 cos(pi r) = Q(r^2), from the constant on.
_SINE = (3.1415925800446307, -5.167706878920184, 2.550031377174285, -0.5980451734662967, 0.07722012762878258)
_COSINE = tuple(
    2 * x for x in (0.9999999534672807, -4.934792858700136, 4.058411914411018, -1.331880161936382, 0.219696798730719)
)


def counts_turns(like: Tensor) -> bool:
    """Whether angles of this precision and device are to be given in turns to `cos_and_sin_of_turns`."""
    return like.device.type == "cpu" and like.dtype == torch.float32


def cos_and_sin_of_turns(turns: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write cosine and sine of angles in turns to `cos` and `sin`; overwrites the angles."""
    squares = torch.round(turns)
    turns -= squares
    torch.mul(turns, turns, out=squares)
    half_sine = _polynomial(squares, _SINE, out=torch.empty_like(turns)).mul_(turns)
    torch.mul(_polynomial(squares, _COSINE, out=turns), half_sine, out=sin)
    torch.addcmul(torch.ones(()), half_sine, half_sine, value=-2, out=cos)


def cos_of_turns_(turns: Tensor) -> Tensor:
    """Cosine of angles in turns, in place."""
    squares = torch.round(turns)
    turns -= squares
    torch.mul(turns, turns, out=squares)
    half_sine = turns.mul_(_polynomial(squares, _SINE, out=torch.empty_like(turns)))
    return torch.addcmul(torch.ones(()), half_sine, half_sine, value=-2, out=half_sine)


def _polynomial(x: Tensor, coefficients: tuple[float, ...], out: Tensor) -> Tensor:
    """By Horner's rule, one pass a coefficient."""
    *rest, second, first = coefficients
    torch.add(torch.tensor(second), x, alpha=first, out=out)
    for coefficient in reversed(rest):
        torch.addcmul(torch.tensor(coefficient), out, x, out=out)
    return out
