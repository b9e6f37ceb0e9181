"""Sinkhorn's iteration: from scores to a matrix whose rows and columns sum to 1, nearly a permutation."""

import torch
from torch import Tensor


def sinkhorn(logits: Tensor, allowed: Tensor, *, iterations: int, causal: bool = False) -> Tensor:
    """Normalise the rows and then the columns of exp(logits), `iterations` times, in logarithms.

    Args:
        logits: (..., N, M).
        allowed: Broadcastable to logits; entries that are not allowed are 0. So is a row or column without any.
        causal: Normalise a column over the rows so far only, so that a row does not depend on later ones.

    Returns:
        (..., N, M). The columns sum to 1 (without `causal`), the rows more nearly with every iteration.
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
    return log_p.exp().masked_fill(~allowed, 0)
