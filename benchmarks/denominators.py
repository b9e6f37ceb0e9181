"""`bench denominators`: how often attention with RKS features divides by a negative number.

RKS estimates of a kernel scatter around their mean and can be negative; so can their sum over the keys. Smoothing
adds a constant to the kernel. Queries and keys are N(0, 1) before the scaling by D^(-1/4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from klformer.attention import build_attention
from klformer.lab.bench.measure import write_report
from klformer.lab.environment import describe_machine
from klformer.lab.tables import Table, number, percent, words
from klformer.lab.terminal import make_console

_ATTENTIONS = ("rbf-rks", "gmm-rks", "fastfood-rks", "generative-rks")


@dataclass(frozen=True)
class DenominatorBench:
    """Share of queries whose normaliser is negative, without and with smoothing.

    Example: klformer --plugin benchmarks bench denominators
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
    json: Path | None = None
    """Write all figures to this file."""


@torch.no_grad()
def run(options: DenominatorBench) -> None:
    """Count, print one row an attention and length, and write the figures where they were asked for."""
    torch.manual_seed(0)
    results = [row for name in _ATTENTIONS for length in options.lengths for row in _count(name, length, options)]
    title = f"share of negative denominators, D={options.head_dim} R={options.num_frequencies}, q, k ~ N(0, 1)"
    console = make_console(80)
    replace(denominator_table(results), title=title).print(console)
    write_report(options.json, describe_machine(), {"options": asdict(options), "results": results}, console)


def denominator_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for every attention and number of keys, with a column for every smoothing."""
    lines: dict[tuple[str, int], dict[str, object]] = {}
    for row in rows:
        name, keys = row["attention"], row["keys"]
        line = lines.setdefault((name, keys), {"attention": words(name, code=True), "keys": number(keys, "{:,}")})
        line[f"smoothing {row['smoothing']:g}"] = percent(row["negative_share"], "{:.1f}%")
    return Table.of(list(lines.values()))


def _count(name: str, keys: int, options: DenominatorBench) -> list[dict[str, Any]]:
    """A row for every smoothing."""
    q, k = torch.randn(2, 1, options.heads, keys, options.head_dim)
    rows = []
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
        share = negative.float().mean().item()
        rows.append({"attention": name, "keys": keys, "smoothing": smoothing, "negative_share": share})
    return rows
