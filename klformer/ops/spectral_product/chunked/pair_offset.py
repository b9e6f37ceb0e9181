"""Frequencies in pairs omega + offset and omega - offset that share their noise, at the price of one.

With a = x omega^T and b = x.offset, the two frequencies of a pair give

    1/2 [cos(da + db) + cos(da - db)] = cos(da) cos(db),      da = a_q - a_k,  db = b_q - b_k,

so the features are [cos a, sin a] (outer) [cos b, sin b]. The second factor is one angle a token: it goes to the values
(`modulate`), of which there are twice as many then, and comes back out of the product (`demodulate`). Half the
projections and half the sines are saved. Without an offset (`angle` None) functions here pass their operand through.
"""

import torch
from torch import Tensor


def modulate(values: Tensor, angle: Tensor | None) -> Tensor:
    """(n, W, chunk) -> [values cos b, values sin b], (n, 2 W, chunk); angle (n, 1, chunk)."""
    if angle is None:
        return values
    return torch.cat([values * angle.cos(), values * angle.sin()], dim=1)


def demodulate(product: Tensor, angle: Tensor | None) -> Tensor:
    """[X, Y] -> X cos b + Y sin b, (n, W, chunk)."""
    if angle is None:
        return product
    even, odd = product.chunk(2, dim=1)
    return torch.addcmul(even * angle.cos(), odd, angle.sin())


def turned(product: Tensor, angle: Tensor) -> Tensor:
    """[X, Y] -> the derivative of `demodulate` by b: Y cos b - X sin b."""
    even, odd = product.chunk(2, dim=1)
    return torch.addcmul(odd * angle.cos(), even, angle.sin(), value=-1)
