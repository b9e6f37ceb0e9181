"""`klformer bench denominators`: how often attention with RKS features divides by a negative number.

RKS estimates of a kernel scatter around their mean and can be negative; so can their sum over the keys. Smoothing
adds a constant to the kernel. Queries and keys are N(0, 1) before the scaling by D^(-1/4).
"""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from klformer.attention import build_attention


@dataclass(frozen=True)
class DenominatorBench:
    """Share of queries whose normaliser is negative, without and with smoothing.

    Example: klformer bench denominators
    """

    head_dim: int = 64
    """Size D of queries and keys."""
    num_frequencies: int = 256
    """Frequencies R."""
    lengths: tuple[int, ...] = (128, 1024, 4096)
    """Numbers of keys."""
    smoothings: tuple[float, ...] = (0.0, 0.1, 1.0)
    """Constants added to the kernel."""
    heads: int = 32
    """Independent rows to count over."""


@torch.no_grad()
def run(options: DenominatorBench) -> None:
    """Count and print one row an attention and length."""
    torch.manual_seed(0)
    table = Table(
        title=f"share of negative denominators, D={options.head_dim} R={options.num_frequencies}, q, k ~ N(0, 1)"
    )
    table.add_column("attention")
    table.add_column("keys", justify="right")
    for smoothing in options.smoothings:
        table.add_column(f"smoothing {smoothing:g}", justify="right")
    for name in ("rbf-rks", "gmm-rks", "fastfood-rks", "generative-rks"):
        for length in options.lengths:
            q, k = torch.randn(2, 1, options.heads, length, options.head_dim)
            shares = []
            for smoothing in options.smoothings:
                attention = build_attention(
                    name,
                    num_heads=options.heads,
                    head_dim=options.head_dim,
                    num_frequencies=options.num_frequencies,
                    smoothing=smoothing,
                )
                total = attention.features(k, role="key").sum(-2, keepdim=True)
                negative = (attention.features(q, role="query") * total).sum(-1) < 0
                shares.append(f"{100 * negative.float().mean().item():.1f}%")
            table.add_row(name, f"{length:,}", *shares)
    Console().print(table)
