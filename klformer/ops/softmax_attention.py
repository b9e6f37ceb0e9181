"""Softmax attention over given keys: what the sparse attentions are put together from.

`visible` says which keys a query sees (True = sees). A query that sees none gives 0, with gradient 0, and what a key
holds that nobody sees (inf, nan) has no effect as long as the caller has put zeros there (`hide`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from klformer.ops.transforms import is_transformed


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (B, H, S, ...) with zeros where key_mask (B, S) is False: a weight of 0 does not protect from inf or nan."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def visible_keys(key_mask: Tensor | None, q: Tensor, k: Tensor, *, causal: bool) -> Tensor | None:
    """Who sees whom under a mask (B, S) and causality, broadcastable to (B, H, L, S); None if all see all."""
    visible = None if key_mask is None else key_mask[:, None, None]
    if causal:
        past = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        visible = past[None, None] if visible is None else visible & past
    return visible


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v through torch's scaled_dot_product_attention, which never writes out the scores.

    Args:
        q: Queries (N, H, L, D).
        k: Keys (N, H, S, D).
        v: Values (N, H, S, E).
        visible: Broadcastable to (N, H, L, S).
        causal: Query i sees keys 0 .. i, if `visible` is None.
        scale: 1 / sqrt(D) if None.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width = v.shape[-1]
    if q.shape[-1] != width and q.device.type == "cpu":
        # The kernel for CPUs wants D = E, or else all the scores are written out. Zeros change nothing.
        size = max(q.shape[-1], width)
        q, k, v = (pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
    if visible is None:
        return _dot_product_attention(q, k, v, is_causal=causal, scale=scale)[..., :width]
    # A softmax over nothing is nan, also in the gradient: such a query sees everything, and its result is replaced.
    sees_none = ~visible.any(-1, keepdim=True)
    out = _dot_product_attention(q, k, v, attn_mask=visible | sees_none, scale=scale)
    return out[..., :width].masked_fill(sees_none, 0)


def _dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's, in plain operations where its fused ones have no derivative."""
    if not is_transformed(q, k, v):
        return scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, **options)


def softmax_weights(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis of `scores` where `visible`, and the logarithm of its normaliser.

    Rows that see nothing have weights 0 and a normaliser of log 0.
    """
    sees_none = ~visible.any(-1, keepdim=True)
    # Hidden scores are replaced before they are used: they may be anything.
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(sees_none, 0)
    # Not exp(scores - logsumexp): beside large scores the logarithm of the number of keys is lost to rounding.
    weights = scores.softmax(-1).masked_fill(sees_none, 0)
    return weights, scores.logsumexp(-1).masked_fill(sees_none.squeeze(-1), float("-inf"))


def merge(parts: Tensor, log_normalisers: Tensor) -> Tensor:
    """One attention over the keys of several: their results weighted by their normalisers.

    Args:
        parts: Results (P, ..., E) over disjoint sets of keys.
        log_normalisers: (P, ...), as `softmax_weights` gives them.

    Returns:
        (..., E), the attention over the union; 0 where all normalisers are 0.
    """
    sees = log_normalisers > float("-inf")
    weights, _ = softmax_weights(log_normalisers.movedim(0, -1), sees.movedim(0, -1))
    return (parts * weights.movedim(-1, 0).unsqueeze(-1)).sum(0)
