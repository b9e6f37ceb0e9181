"""Shared by the tests: small problems whose sizes are all different, oracles, and distances."""

from dataclasses import dataclass

import torch
from torch import Tensor

import klformer
from klformer.attention.softmax import SoftmaxAttention
from klformer.ops import reference

# A swapped axis can't pass: every size is its own prime (frequencies come in pairs for the tied mixture).
BATCH, HEADS, QUERIES, KEYS, HEAD_DIM, VALUE_DIM, FREQUENCIES = 2, 3, 11, 13, 5, 7, 34


@dataclass
class Operands:
    q: Tensor
    k: Tensor
    v: Tensor

    def __iter__(self):
        return iter((self.q, self.k, self.v))

    def require_grad(self) -> "Operands":
        for x in self:
            x.requires_grad_()
        return self


def operands(
    *, dtype=torch.float64, causal=False, batch=BATCH, queries=QUERIES, keys=KEYS, std=1.0, heads=HEADS
) -> Operands:
    if causal:
        keys = queries
    return Operands(
        q=std * torch.randn(batch, heads, queries, HEAD_DIM, dtype=dtype),
        k=std * torch.randn(batch, heads, keys, HEAD_DIM, dtype=dtype),
        v=torch.randn(batch, heads, keys, VALUE_DIM, dtype=dtype),
    )


def build(name: str, *, dtype=torch.float64, **options) -> klformer.AttentionMechanism:
    """The attention at the sizes above."""
    if "num_frequencies" in klformer.attention_options(name):
        options.setdefault("num_frequencies", FREQUENCIES)
    mechanism = klformer.build_attention(
        name, num_heads=HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, max_len=512, **options
    )
    return mechanism.to(dtype)


def half_masked(batch=BATCH, keys=KEYS) -> Tensor:
    """A padding mask with holes, and at least one key in every row."""
    mask = torch.rand(batch, keys) > 0.4
    mask[:, 0] = True
    mask[:, -1] = False
    return mask


def quadratic(mechanism: klformer.AttentionMechanism, x: Operands, *, key_mask=None, causal=False) -> Tensor:
    """The same attention from its definition, through the whole (L, S) matrix."""
    if isinstance(mechanism, SoftmaxAttention):
        logits = x.q @ x.k.transpose(-1, -2) / x.q.shape[-1] ** 0.5
        return reference.attention_from_log_kernel(logits, x.v, key_mask=key_mask, causal=causal)
    kernel = mechanism.features(x.q, role="query") @ mechanism.features(x.k, role="key").transpose(-1, -2)
    return reference.attention_from_kernel(kernel, x.v, key_mask=key_mask, causal=causal)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp(min=1e-30)).item()
