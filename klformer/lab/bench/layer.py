"""`klformer bench layer`: a training step of one attention layer on one very long sequence."""

import time
from dataclasses import dataclass

import torch
from rich.console import Console

from klformer.attention import AttentionSpec, MultiheadAttention
from klformer.lab.environment import describe_machine
from klformer.memory import MEBIBYTE, extra_peak_memory


@dataclass(frozen=True)
class LayerBench:
    """A training step of one multi-head attention layer with its projections.

    Example: klformer bench layer --length 1000000
    """

    attention: str = "gmm-rks"
    """Name of the attention."""
    length: int = 1_000_000
    """Tokens in the sequence."""
    heads: int = 4
    """Heads H."""
    head_dim: int = 32
    """Size D of queries, keys and values; the model has H D."""
    num_frequencies: int = 64
    """Frequencies R."""


def run(options: LayerBench) -> None:
    """Run a step and print what it took."""
    console = Console()
    environment = describe_machine()
    torch.manual_seed(0)
    layer = MultiheadAttention(
        model_dim=options.heads * options.head_dim,
        num_heads=options.heads,
        attention=AttentionSpec(name=options.attention, options={"num_frequencies": options.num_frequencies}),
    )

    def step(length: int) -> float:
        x = torch.randn(1, length, options.heads * options.head_dim, requires_grad=True)
        start = time.perf_counter()
        layer(x).square().mean().backward()
        return time.perf_counter() - start

    step(1024)
    elapsed: list[float] = []
    peak = extra_peak_memory(lambda: elapsed.append(step(options.length)))
    sizes = f"H={options.heads} D={options.head_dim} R={options.num_frequencies}"
    console.print(f"{environment['date']}, {environment['machine']}")
    console.print(f"{options.attention}, {options.length:,} tokens, {sizes}: a training step of the layer")
    console.print(f"took {elapsed[0]:.1f} s, peak memory {peak / MEBIBYTE / 1024:.2f} GiB")
