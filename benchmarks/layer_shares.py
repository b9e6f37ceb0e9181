"""`bench layer-shares`: where the time of a layer of an encoder goes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.shares import measure_shares, share_table
from klformer.attention import AttentionSpec
from klformer.checks import check_count
from klformer.lab.bench.measure import write_report
from klformer.lab.environment import describe_machine
from klformer.lab.terminal import make_console
from klformer.models import EncoderConfig, TransformerEncoder


@dataclass(frozen=True)
class LayerSharesBench:
    """Shares of matrix products, sines, norms, copies and calls in the time of an encoder of one layer.

    Example: klformer --plugin benchmarks bench layer-shares --attentions gmm-prf softmax
    """

    attentions: tuple[str, ...] = ("gmm-prf:num_frequencies=64", "gmm-rks:num_frequencies=64")
    """Attentions, with options after a colon."""
    batch: int = 32
    """Sequences B."""
    length: int = 512
    """Tokens L of each."""
    heads: int = 4
    """Heads H."""
    model_dim: int = 64
    """Size of a token."""
    ffn_dim: int = 128
    """Hidden size of the feed-forward part."""
    repeats: int = 5
    """Steps that are profiled."""
    json: Path | None = None
    """Write all figures to this file."""


def run(options: LayerSharesBench) -> None:
    """Profile, print the table, and write the figures where they were asked for."""
    check_count("repeats", options.repeats)
    console, environment = make_console(130), describe_machine()
    results = [
        {"name": name, **measure_shares(_step(options, AttentionSpec.parse(name)), repeats=options.repeats)}
        for name in options.attentions
    ]
    shape = f"{options.batch} x {options.length:,} tokens, H={options.heads}, width {options.model_dim}"
    title = f"an encoder layer, forward + backward, {shape}, {environment['date']}, {environment['machine']}"
    replace(share_table(results), title=title).print(console)
    write_report(options.json, environment, {"options": asdict(options), "results": results}, console)


def _step(options: LayerSharesBench, attention: AttentionSpec) -> Callable[[], None]:
    torch.manual_seed(0)
    config = EncoderConfig(
        num_layers=1,
        num_heads=options.heads,
        model_dim=options.model_dim,
        ffn_dim=options.ffn_dim,
        dropout=0.0,
        attention=attention,
    )
    encoder, x = TransformerEncoder(config), torch.randn(options.batch, options.length, options.model_dim)
    wanted = [x.requires_grad_(), *encoder.parameters()]

    def step() -> None:
        torch.autograd.grad(encoder(x).mean(1).square().sum(), wanted)

    return step
