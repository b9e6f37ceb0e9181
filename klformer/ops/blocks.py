"""Sequences cut into blocks: what local, longformer, bigbird, sparse and sinkhorn share.

A sequence (B, H, L, D) becomes N blocks of `size` tokens, (B, N, H, size, D), the last one filled up with zeros. Blocks
are then short attention problems side by side: (B N, H, size, D).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from klformer.ops.softmax_attention import attend


def cut(x: Tensor, size: int) -> Tensor:
    """(B, H, L, ...) -> (B, N, H, size, ...), filled up with zeros (False)."""
    batch, heads, length, width = x.shape
    num_blocks = -(-length // size)
    missing = num_blocks * size - length
    if missing:
        x = pad(x, (0, 0, 0, missing))
    return x.reshape(batch, heads, num_blocks, size, width).transpose(1, 2)


def join(blocks: Tensor, length: int) -> Tensor:
    """(B, N, H, size, ...) -> (B, H, L, ...), the inverse of `cut`."""
    return blocks.transpose(1, 2).flatten(2, 3)[:, :, :length]


def cut_mask(key_mask: Tensor | None, x: Tensor, size: int) -> Tensor:
    """(B, N, 1, 1, size): which tokens of the blocks of x (B, H, L, D) are there and not padding."""
    if key_mask is None:
        key_mask = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device)
    return cut(key_mask[:, None, :, None], size).transpose(-1, -2)


def neighbours(blocks: Tensor, before: int, after: int, *, dim: int) -> Tensor:
    """Every block with `before` blocks ahead of it and `after` behind, side by side along `dim`; zeros at the ends."""
    num_blocks = blocks.shape[1]
    # pad() counts axes from the last one; the blocks are axis 1.
    padding = [0, 0] * (blocks.dim() - 2) + [before, after]
    padded = pad(blocks, padding)
    return torch.cat([padded[:, shift : shift + num_blocks] for shift in range(before + after + 1)], dim=dim)


def block_positions(num_blocks: int, size: int, *, before: int = 0, after: int = 0, device: torch.device) -> Tensor:
    """(1, N, 1, 1, (before + 1 + after) size): positions of the tokens of `neighbours`, below 0 ahead of the first."""
    starts = torch.arange(num_blocks, device=device).view(1, num_blocks, 1, 1, 1) * size
    return starts + torch.arange(-before * size, (after + 1) * size, device=device)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention inside blocks: q (B,N,H,b,D), k (B,N,H,K,D), v (B,N,H,K,E), visible (1|B,N,1|H,1|b,K)."""
    batch, num_blocks = q.shape[:2]
    visible = visible.expand(batch, num_blocks, *visible.shape[2:])
    out = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), visible.flatten(0, 1))
    return out.view(batch, num_blocks, *out.shape[1:])
