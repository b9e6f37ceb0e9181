"""Small problems for any attention: sizes that are all different, operands, masks, and a distance."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import klformer
from klformer.attention import AttentionSpec

# A swapped axis can't pass: every size is its own prime (frequencies come in pairs for the tied mixture).
BATCH, HEADS, QUERIES, KEYS, HEAD_DIM, VALUE_DIM, FREQUENCIES = 2, 3, 11, 13, 5, 7, 34
MAX_LEN = 512


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
    *, dtype=torch.float64, causal=False, own_keys=False, batch=BATCH, queries=QUERIES, keys=KEYS, std=1.0, heads=HEADS
) -> Operands:
    if causal or own_keys:
        keys = queries
    return Operands(
        q=std * torch.randn(batch, heads, queries, HEAD_DIM, dtype=dtype),
        k=std * torch.randn(batch, heads, keys, HEAD_DIM, dtype=dtype),
        v=torch.randn(batch, heads, keys, VALUE_DIM, dtype=dtype),
    )


#: Options at which short sequences have several blocks, chunks and buckets.
SMALL_OPTIONS = {
    "local": {"block_size": 4},
    "longformer": {"window": 4, "num_global": 2},
    "bigbird": {"block_size": 2, "random_blocks": 1},
    "sparse": {"block_size": 4, "num_summary": 2},
    "linformer": {"rank": 6},
    "reformer": {"num_buckets": 2, "chunk_size": 2, "num_rounds": 2},
    "sinkhorn": {"block_size": 4, "iterations": 2},
    "synthesizer": {"rank": 6},
}


def small_options(name: str) -> dict[str, Any]:
    """Options of an attention for short sequences and few frequencies."""
    usual = klformer.attention_options(name)
    if "num_frequencies" in usual:
        return {"num_frequencies": FREQUENCIES}
    return SMALL_OPTIONS.get(name, {})


def build(name: str, *, dtype=torch.float64, max_len=MAX_LEN, **options) -> klformer.AttentionMechanism:
    """The attention at the sizes above; the name may have options, as on the command line."""
    spec = AttentionSpec.parse(name)
    mechanism = klformer.build_attention(
        spec.name,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        value_dim=VALUE_DIM,
        max_len=max_len,
        **(small_options(spec.name) | spec.options | options),
    )
    return mechanism.to(dtype)


def problem(name: str, *, dtype=torch.float64, **sizes) -> tuple[klformer.AttentionMechanism, Operands]:
    """The attention and operands for it: as many keys as queries where it can't do otherwise."""
    mechanism = build(name, dtype=dtype)
    return mechanism, operands(dtype=dtype, own_keys=not mechanism.supports_cross, **sizes)


def half_masked(batch=BATCH, keys=KEYS) -> Tensor:
    """A padding mask with holes, and at least one key in every row."""
    mask = torch.rand(batch, keys) > 0.4
    mask[:, 0] = True
    mask[:, -1] = False
    return mask


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp(min=1e-30)).item()
