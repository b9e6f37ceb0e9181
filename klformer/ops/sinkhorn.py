"""Sinkhorn's iteration: from scores to a matrix whose rows and columns sum to 1, nearly a permutation."""

import torch
from torch import Tensor

from klformer.ops.softmax_attention import softmax_weights


def log_sinkhorn(logits: Tensor, allowed: Tensor, *, iterations: int, causal: bool = False) -> Tensor:
    """Normalise the rows and then the columns of exp(logits), `iterations` times, in logarithms.

    Args:
        logits: (..., N, M).
        allowed: Broadcastable to logits; entries that are not allowed are log 0. So is a row or column without any.
        causal: Normalise a column over the rows so far only, so that a row does not depend on later ones.

    Returns:
        (..., N, M), logarithms. The columns sum to 1 (without `causal`), the rows more nearly with every iteration.
    """
    allowed = allowed.expand_as(logits)
    # Instead of -inf, whose differences are nan: too little to count beside any allowed entry.
    nothing = torch.finfo(logits.dtype).min / 4
    log_p = logits.masked_fill(~allowed, nothing)
    for _ in range(iterations):
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        log_p = log_p.masked_fill(~allowed, nothing)
        total = log_p.logcumsumexp(-2) if causal else log_p.logsumexp(-2, keepdim=True)
        log_p = (log_p - total).masked_fill(~allowed, nothing)
    return log_p.masked_fill(~allowed, float("-inf"))


def mix(log_p: Tensor, present: Tensor, *blocks: Tensor) -> tuple[list[Tensor], Tensor]:
    """Blocks mixed token by token with the weights p: what is not present has no part, and others make up for it.

        mixed_ns = (sum of p_nm over m) / (sum of p_nm over m with s present) * sum of p_nm x_ms over m with s present

    A token of whose weights so little is present that the quotient can't be computed is made of nothing.

    Args:
        log_p: (B, H, N, M), logarithms of the weights.
        present: (B, M, b), the tokens s of the blocks m that are there.
        blocks: (B, M, H, b, ...) each, zeros where nothing is present.

    Returns:
        Mixed blocks (B, N, H, b, ...), and which of their tokens are made of anything, (B, N, H, b).
    """
    # Rows that sum to 1: the sum of p_nm may be too small to divide by.
    rows, log_total = softmax_weights(log_p, log_p > float("-inf"))
    total = log_total.exp().transpose(1, 2)[..., None, None]  # (B, N, H, 1, 1)
    share = torch.einsum("bhnm,bms->bnhs", rows, present.to(rows.dtype)).unsqueeze(-1)
    # The gradient has the square of the share below it.
    is_made = share > torch.finfo(share.dtype).tiny ** 0.5
    scale = total / share.masked_fill(~is_made, 1)
    return [scale * torch.einsum("bhnm,bmhsd->bnhsd", rows, x) for x in blocks], is_made.squeeze(-1)
