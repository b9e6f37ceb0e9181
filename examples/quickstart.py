"""Attention with a learned kernel in a few lines: which of eight symbols is more frequent in a long sequence?"""

import time

import torch

import klformer

LENGTH, SYMBOLS = 1024, 8


class Model(torch.nn.Module):
    """Embedding, two layers of the chosen attention, mean over the positions, scores."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(SYMBOLS, 32)
        self.encoder = klformer.TransformerEncoder(
            model_dim=32, num_layers=2, num_heads=2, ffn_dim=64, attention=attention, dropout=0.0
        )
        self.score = torch.nn.Linear(32, SYMBOLS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.score(self.encoder(self.embed(tokens)).mean(1))


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform symbols, of which one, the label, replaces a tenth of the others."""
    label = torch.randint(SYMBOLS, (size,))
    tokens = torch.randint(SYMBOLS, (size, LENGTH))
    return torch.where(torch.rand(size, LENGTH) < 0.1, label[:, None], tokens), label


print(f"Which of {SYMBOLS} symbols is more frequent among {LENGTH:,}? Chance is {100 / SYMBOLS:.1f}%.")
for name in ("gmm-rks", "gmm-prf", "performer", "softmax"):
    torch.manual_seed(0)
    model, start = Model(name), time.perf_counter()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        if step % 20 == 0:
            klformer.resample(model)
        tokens, label = make_batch(8)
        loss = torch.nn.functional.cross_entropy(model(tokens), label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        tokens, label = make_batch(128)
        accuracy = (model.eval()(tokens).argmax(-1) == label).float().mean().item()
    print(f"{name:10s} accuracy {100 * accuracy:5.1f}%   {time.perf_counter() - start:5.1f} s")
