"""Gradient descent finds a kernel that was hidden in data: nothing else is there to be learned.

Targets are outputs of attention with a periodic kernel. Queries, keys and values are given. No
projection can do the kernel's work.
"""

import torch

import klformer

DIM, LENGTH, STEPS = 2, 64, 300


def hidden_kernel(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(1 + mean over dimensions of cos 3(q - k)) / 2, for all pairs: (B, L, D), (B, S, D) -> (B, L, S)."""
    difference = q.unsqueeze(-2) - k.unsqueeze(-3)
    return (1 + torch.cos(3 * difference).mean(-1)) / 2


def batch(size: int = 16) -> tuple[torch.Tensor, ...]:
    q, k = torch.randn(2, size, LENGTH, DIM)
    v = torch.randn(size, LENGTH, 1)
    weights = hidden_kernel(q, k)
    targets = weights @ v / weights.sum(-1, keepdim=True)
    return q, k, v, targets


def outputs(attention: klformer.AttentionMechanism, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One head: (B, L, D) -> (B, 1, L, D) and back."""
    return attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)


torch.manual_seed(0)
attention = klformer.build_attention(
    "atoms-rks", num_heads=1, head_dim=DIM, value_dim=1, num_frequencies=32, start="gmm", learn_smoothing=True
)
optimiser = torch.optim.Adam(attention.parameters(), lr=0.03)
for step in range(STEPS + 1):
    q, k, v, targets = batch()
    loss = (outputs(attention, q, k, v) - targets).square().mean() / targets.square().mean()
    if step % 100 == 0:
        print(f"step {step:3d}: relative error {loss.item():.4f}")
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
