"""Frequencies in pairs omega + offset and omega - offset that share their noise, at the price of one.

With a = x omega^T and b = x.offset, the two frequencies of a pair give

    1/2 [cos(da + db) + cos(da - db)] = cos(da) cos(db),      da = a_q - a_k,  db = b_q - b_k,

so the features are [cos a, sin a] (outer) [cos b, sin b]. The second factor is one angle a token: it goes to the values
(`modulate`), which become twice as wide, and comes back out of the product (`demodulate`). Half the projections and
half the sines are saved. Without an offset (`angle` None) every function here passes its operand through.
"""

import torch
from torch import Tensor


def modulate(values: Tensor, angle: Tensor | None) -> Tensor:
    """(n, chunk, W) -> [values cos b, values sin b], (n, chunk, 2 W)."""
    if angle is None:
        return values
    return torch.cat([values * angle.cos(), values * angle.sin()], dim=-1)


def demodulate(product: Tensor, angle: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[X, Y] -> X cos b + Y sin b, and its derivative by b, both (n, chunk, W)."""
    if angle is None:
        return product, None
    cos, sin = angle.cos(), angle.sin()
    even, odd = product.chunk(2, dim=-1)
    return torch.addcmul(even * cos, odd, sin), torch.addcmul(odd * cos, even, sin, value=-1)


def modulate_vjp(values: Tensor, d_modulated: Tensor, angle: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of the values (n, chunk, W) and of the angle (n, chunk, 1), given that of `modulate`'s result."""
    d_values, slope = demodulate(d_modulated, angle)
    return d_values, None if slope is None else (values * slope).sum(-1, keepdim=True)
