"""Features and frequencies are never rounded to half precision: autocast is switched off around them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def full_precision(x: Tensor) -> Iterator[torch.dtype]:
    """A context without autocast, and the precision to compute in: that of x, but no less than float32."""
    precision = torch.promote_types(x.dtype, torch.float32)
    # Nothing to switch off; to do so costs as much as a small matrix product.
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        yield precision
        return
    with torch.autocast(x.device.type, enabled=False):
        yield precision
