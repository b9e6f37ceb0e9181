"""Memory of chunks that is used again: by every chunk, tile and call of a thread.

glibc gives large blocks back to the system when they are freed, and has them zeroed page by page when they are wanted
again. That costs a chunk as much as a pass of arithmetic. Chunks are of one size, so that a few blocks serve all.
"""

import math
import threading

import torch
from torch import Tensor

#: The largest block that a thread keeps from call to call, in bytes; there are few, by use.
MAX_KEPT_BYTES = 8 * 2**20


class _Kept(threading.local):
    """Blocks by use, each with the tensor that it was last given out as."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}


_kept = _Kept()


def borrow(use: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the device of `like`. The next that is borrowed for the same use overwrites it."""
    # Other devices keep freed memory themselves, and what is traced has no memory.
    if like.device.type != "cpu" or type(like) is not Tensor:
        return torch.empty(shape, dtype=dtype, device=like.device)
    lent = _lend(use, shape, dtype)
    # In deterministic mode torch fills what is uninitialised. Whoever reads it, or still reads what was lent for the
    # same use before, gets NaN.
    return lent.fill_(torch.nan) if torch.are_deterministic_algorithms_enabled() else lent


def _lend(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    block, last = _kept.blocks.get((use, dtype), (None, None))
    if last is not None and last.shape == shape:
        return last
    size = math.prod(shape)
    if size * dtype.itemsize > MAX_KEPT_BYTES:
        return torch.empty(shape, dtype=dtype)
    with torch.inference_mode(False):  # a block outlives the mode that it is made in
        block = torch.empty(size, dtype=dtype) if block is None or block.numel() < size else block
        last = block[:size].view(shape)
    _kept.blocks[use, dtype] = block, last
    return last
