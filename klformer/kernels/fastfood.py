"""FastFood: frequencies from products of diagonal, permutation and Hadamard matrices (Eq. 6 of the paper).

    V = 1 / (lengthscale sqrt d) S H G Pi H B

H is the Walsh-Hadamard matrix, B, G and S are diagonal, Pi is a permutation. With random signs in B, N(0, 1) in G and
S_i = chi_d / |G| every row of V is distributed as N(0, I / lengthscale^2), exactly. A block has d rows, d the next
power of two of the head size (inputs are padded with zeros); R frequencies take ceil(R / d) blocks. The paper asks
for "M | d_q", which must read d_q | M; with padding and truncation any R works.

The blocks are formed with the fast transform, d^2 log d once a forward, and go through the same product as every
other kernel: one matrix product is faster than transforming every token.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from klformer.checks import check_choice, check_number
from klformer.errors import ArgumentError
from klformer.kernels.coupling import Coupling, check_coupling, draw_normal, draw_norms, draw_signs
from klformer.kernels.spectrum import SpectralDistribution
from klformer.ops.hadamard import hadamard_transform, next_power_of_two


class FastFoodSpectrum(SpectralDistribution):
    """FastFood, FastFood-S and FastFood-SGB of the paper, one set of diagonals a head.

    Args:
        num_heads: Heads H.
        head_dim: Size D of a frequency.
        num_frequencies: Frequencies R.
        learn: "sgb" learns all three diagonals (the paper's main model), "s" only S, "none" nothing. What is not
            learned is noise and redrawn by `resample`; the permutation always is.
        init: "structured" draws the diagonals as above: the kernel starts as a Gaussian of the given lengthscale.
            "released" draws all three from N(0, 1/d), as the authors' code does: frequencies start near 0 (norm 0.013
            at d = 64) and the kernel as a constant.
        lengthscale: Width of the kernel at the start. "auto" is 1 for the released initialisation and D^(1/4) for the
            structured one, at which queries and keys of unit variance, scaled by D^(-1/4), differ by an exponent of
            about 1, like the logits of softmax. With positive features it is the Gaussian kernel at 1 only.
        coupling: "iid", or "antithetic": frequencies in pairs omega and -omega, for "prf"; it doubles the variance of
            "rks". Not "orthogonal": rows of a block are orthogonal only if all of G have one size, and then they are
            not Gaussian.

    Raises:
        ArgumentError: a value is not allowed.

    Examples:
        >>> from klformer.kernels import FastFoodSpectrum
        >>> FastFoodSpectrum(num_heads=2, head_dim=8, num_frequencies=32).frequencies().shape
        torch.Size([2, 32, 8])
    """

    scaling: Tensor
    gaussian: Tensor
    signs: Tensor
    permutation: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_frequencies: int = 256,
        learn: Literal["none", "s", "sgb"] = "sgb",
        init: Literal["structured", "released"] = "structured",
        lengthscale: float | Literal["auto"] = "auto",
        coupling: Coupling = "iid",
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        check_choice("learn", learn, ("none", "s", "sgb"))
        check_choice("init", init, ("structured", "released"))
        check_coupling(coupling)
        if coupling == "orthogonal":
            raise ArgumentError(
                "coupling must be 'iid' or 'antithetic' for FastFood, got 'orthogonal': the rows of a block can't be "
                "Gaussian and orthogonal at once"
            )
        if lengthscale == "auto":
            lengthscale = head_dim**0.25 if init == "structured" else 1.0
        check_number("lengthscale", lengthscale, exclusive=True)
        self.learn = learn
        self.init = init
        self.lengthscale = lengthscale
        self.block_dim = next_power_of_two(head_dim)
        self.coupling = coupling
        num_rows = -(-num_frequencies // 2) if coupling == "antithetic" else num_frequencies
        self.num_blocks = -(-num_rows // self.block_dim)
        shape = (num_heads, self.num_blocks, self.block_dim)
        self._diagonal("scaling", shape, learned=learn != "none")
        self._diagonal("gaussian", shape, learned=learn == "sgb")
        self._diagonal("signs", shape, learned=learn == "sgb")
        self.register_buffer("permutation", torch.empty(shape, dtype=torch.long))
        self._draw_diagonals(None, learned_too=True)
        self._draw_permutation(None)

    def _diagonal(self, name: str, shape: tuple[int, ...], *, learned: bool) -> None:
        if learned:
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        else:
            self.register_buffer(name, torch.empty(shape))

    @torch.no_grad()
    def _draw_diagonals(self, generator: torch.Generator | None, *, learned_too: bool) -> None:
        """Draw the diagonals B, G and S; without `learned_too` only those that are noise."""
        scaling, gaussian, signs = self.scaling, self.gaussian, self.signs
        is_released, factor = self.init == "released", self.block_dim**-0.5
        with_scaling = learned_too or self.learn == "none"
        if learned_too or self.learn != "sgb":
            norm = gaussian.norm(dim=-1, keepdim=True)
            (draw_normal if is_released else draw_signs)(signs, generator)
            draw_normal(gaussian, generator)
            if is_released:
                signs *= factor
                gaussian *= factor
            elif not with_scaling:  # S was divided by |G|, which must stay: the spectrum would widen
                gaussian *= norm / gaussian.norm(dim=-1, keepdim=True)
        if with_scaling and is_released:
            draw_normal(scaling, generator)
            scaling *= factor
        elif with_scaling:
            norms = draw_norms(tuple(scaling.shape), self.block_dim, generator).to(scaling.device)
            scaling.copy_(norms / gaussian.norm(dim=-1, keepdim=True))

    @torch.no_grad()
    def _draw_permutation(self, generator: torch.Generator | None) -> None:
        keys = torch.empty(self.permutation.shape)
        draw_normal(keys, generator)
        self.permutation.copy_(keys.argsort(dim=-1))

    def resample(self, generator: torch.Generator | None = None) -> None:
        self._draw_diagonals(generator, learned_too=False)
        self._draw_permutation(generator)

    def frequencies(self) -> Tensor:
        scaling, gaussian, signs = self.scaling, self.gaussian, self.signs
        identity = torch.eye(self.block_dim, dtype=signs.dtype, device=signs.device)
        columns = hadamard_transform(identity) * signs.unsqueeze(-2)  # H B, (H, blocks, d, d)
        index = self.permutation.unsqueeze(-1).expand(*self.permutation.shape, self.block_dim)
        columns = columns.gather(-2, index) * gaussian.unsqueeze(-1)  # G Pi H B
        # The transform works along the last dimension: H M = (M^T H)^T.
        columns = hadamard_transform(columns.transpose(-1, -2)).transpose(-1, -2)
        rows = columns * (scaling / (self.lengthscale * self.block_dim**0.5)).unsqueeze(-1)
        rows = rows.flatten(1, 2)[..., : self.head_dim]
        if self.coupling == "antithetic":
            rows = rows[:, : -(-self.num_frequencies // 2)]
            rows = torch.cat([rows, -rows], dim=1)
        return rows[:, : self.num_frequencies]

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, learn={self.learn!r}, init={self.init!r}, lengthscale={self.lengthscale:g}, "
            f"coupling={self.coupling!r}"
        )
