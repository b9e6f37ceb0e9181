"""How far training has moved a kernel from its start: its frequencies, and the kernel itself.

Both are compared under equal noise, so that what is measured was learned and not drawn:

    |Omega - Omega_0| / |Omega_0|        and        |K - K_0| / |K_0|  for K = kappa(q_i, k_j), q, k ~ N(0, I)

A kernel can move while its frequencies rest (weights, smoothing, temperature), and frequencies can move while the
kernel rests (a rotation of a Gaussian).
"""

from dataclasses import dataclass

import torch

from klformer.kernels.kernel import Kernel
from klformer.noise import kept_noise, resample

#: Queries, and as many keys, at which kernels are compared.
_POINTS = 64
_SEED = 0


@dataclass(frozen=True)
class Movement:
    """Relative changes, means over heads and draws."""

    frequencies: float
    kernel: float


@torch.no_grad()
def kernel_movement(start: Kernel, present: Kernel, *, draws: int = 4) -> Movement | None:
    """How far `present` is from `start`, a copy of it from before training; None without frequencies."""
    if start.spectrum is None or present.spectrum is None:
        return None
    device = present.spectrum.anchor().device
    generator = torch.Generator().manual_seed(_SEED)
    shape = (1, present.spectrum.num_heads, _POINTS, present.spectrum.head_dim)
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2))
    changes: list[tuple[float, float]] = []
    with kept_noise(start), kept_noise(present):
        for draw in range(draws):
            for kernel in (start, present):
                resample(kernel, torch.Generator().manual_seed(_SEED + draw))
            frequencies = [kernel.scaled_frequencies().double() for kernel in (start, present)]
            values = [kernel.estimate(q, k)[0] for kernel in (start, present)]
            changes.append((_relative_change(*frequencies), _relative_change(*values)))
    means = torch.tensor(changes).mean(0)
    return Movement(frequencies=means[0].item(), kernel=means[1].item())


def _relative_change(before: torch.Tensor, after: torch.Tensor) -> float:
    """|after - before| / |before| of every head, (H or 1, ., .), averaged."""
    change = (after - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1).clamp(min=1e-300)
    return change.mean().item()
