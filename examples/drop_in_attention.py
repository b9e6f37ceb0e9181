"""A learned kernel in the place of `torch.nn.MultiheadAttention`, in a model that knows nothing of klformer."""

import torch
from torch import nn

import klformer
import klformer.nn


class Block(nn.Module):
    """A Transformer block as many people write it."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)
        self.feed_forward = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU())
        self.back = nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return x + self.back(self.feed_forward(x))


def replace_attention(model: nn.Module, attention: str) -> None:
    """Every `nn.MultiheadAttention` gives way; its projections are kept."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, klformer.nn.MultiheadAttention.from_torch(child, attention=attention))


torch.manual_seed(0)
model = Block(size=64, heads=4)
x = torch.randn(2, 1000, 64)
padding = torch.arange(1000) >= torch.tensor([[1000], [700]])  # torch's masks: True = drop

before = model(x, padding)
replace_attention(model, "softmax")
print(f"softmax of klformer: the same outputs up to {(model(x, padding) - before).abs().max().item():.0e}")

model = Block(size=64, heads=4)
replace_attention(model, "gmm-rks:num_frequencies=64")
model(x, padding).square().mean().backward()
kernel = model.attention.mechanism.kernel
learned = {name: tuple(each.shape) for name, each in kernel.named_parameters() if each.grad is not None}
print(f"gmm-rks: the kernel learns with the rest: {learned}")

# What padding holds has no effect, whatever it is.
spoiled = x.masked_fill(padding[..., None], float("nan"))
same = torch.equal(model(x, padding)[1, :700], model(spoiled, padding)[1, :700])
print(f"padding that is NaN changes nothing: {same}")

klformer.resample(model, torch.Generator().manual_seed(1))  # new random frequencies, when you say so
