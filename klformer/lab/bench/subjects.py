"""What the op benchmark compares: the fused product, materialised features, softmax, and matrix products alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import SpectralKernel
from klformer.ops.spectral_product import attend as product


@dataclass(frozen=True)
class Sizes:
    """Shape of a problem, in the letters of the project."""

    batch: int
    heads: int
    length: int
    head_dim: int
    value_dim: int
    frequencies: int

    def result_and_gradients(self) -> int:
        """Return bytes in float32 of the result and of the gradients of queries, keys and values."""
        return 4 * self.batch * self.heads * self.length * 2 * (self.head_dim + self.value_dim)


@dataclass
class Operands:
    """Random operands of the given sizes, and the gradient of the result."""

    q: Tensor
    k: Tensor
    v: Tensor
    omega: Tensor
    d_out: Tensor

    @staticmethod
    def random(sizes: Sizes) -> "Operands":
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        sequence = (sizes.batch, sizes.heads, sizes.length)
        operands = Operands(
            q=normal(*sequence, sizes.head_dim) * sizes.head_dim**-0.25,
            k=normal(*sequence, sizes.head_dim) * sizes.head_dim**-0.25,
            v=normal(*sequence, sizes.value_dim),
            omega=normal(sizes.heads, sizes.frequencies, sizes.head_dim) * 0.3,
            d_out=normal(*sequence, sizes.value_dim),
        )
        for tensor in operands.inputs():
            tensor.requires_grad_()
        return operands

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.omega


def fused(feature_map: str, *, causal: bool, backend: str = "auto") -> Callable[[Operands], Tensor]:
    """Return the product of this library."""

    def attend(x: Operands) -> Tensor:
        smoothing = torch.ones(1) if feature_map == "rks" else None
        # The paper's kernel: exp(-|k|^2) is a weight of the key.
        norm = 1.0 if feature_map == "prf" else 0.0
        kernel = SpectralKernel(FEATURE_MAPS[feature_map], x.omega, smoothing=smoothing, norm_coefficient=norm)
        return product(kernel, x.q, x.k, x.v, causal=causal, backend=backend)[0]

    return attend


def materialised_rks(x: Operands) -> Tensor:
    """Return RKS features of the whole sequence under plain autograd; the normaliser by sums, smoothing by a
    constant."""

    def features(inputs: Tensor) -> Tensor:
        angles = inputs @ x.omega.transpose(-1, -2)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    phi_q, phi_k = features(x.q), features(x.k)
    smoothing = x.omega.shape[-2]
    numerator = phi_q @ (phi_k.transpose(-1, -2) @ x.v) + smoothing * x.v.sum(-2, keepdim=True)
    denominator = phi_q @ phi_k.sum(-2).unsqueeze(-1) + smoothing * x.k.shape[-2]
    return numerator / denominator


def materialised_prf(x: Operands) -> Tensor:
    """Return positive features of the whole sequence under plain autograd, stabilised the same way."""
    scores_q = x.q @ x.omega.transpose(-1, -2)
    scores_k = x.k @ x.omega.transpose(-1, -2) - x.k.square().sum(-1, keepdim=True)
    with torch.no_grad():
        key_shift = scores_k.amax(-2, keepdim=True)
        query_shift = (scores_q + key_shift).amax(-1, keepdim=True)
    phi_k = (scores_k - key_shift).exp()
    phi_q = (scores_q + (key_shift - query_shift)).exp()
    return phi_q @ (phi_k.transpose(-1, -2) @ x.v) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))


def softmax(*, causal: bool) -> Callable[[Operands], Tensor]:
    """Return torch's own attention."""

    def attend(x: Operands) -> Tensor:
        return scaled_dot_product_attention(x.q, x.k, x.v, is_causal=causal)

    return attend


ATTENTIONS: dict[str, Callable[[Operands], Tensor]] = {
    "rks": fused("rks", causal=False),
    "rks causal": fused("rks", causal=True),
    "rks materialised": materialised_rks,
    "prf": fused("prf", causal=False),
    "prf causal": fused("prf", causal=True),
    "prf flash": fused("prf", causal=False, backend="flash_cpu"),
    "prf materialised": materialised_prf,
    "softmax": softmax(causal=False),
    "softmax causal": softmax(causal=True),
}


def forward_and_backward(name: str, operands: Operands) -> Callable[[], None]:
    """Return one training step's worth of the attention: the result and the gradients of all operands."""
    attend = ATTENTIONS[name]
    wanted = [x for x in operands.inputs() if not name.startswith("softmax") or x is not operands.omega]

    def run() -> None:
        torch.autograd.grad(attend(operands), wanted, operands.d_out)

    return run


#: Features of a chunk in bytes, and the longest chunk; the same for both.
CHUNK_BYTES, MAX_CHUNK, MIN_CHUNK = 2 * 2**20, 1024, 32


def matrix_products(sizes: Sizes, *, parts: int, lean: bool) -> Callable[[], None]:
    """Return forward and backward of one call, in pieces that fit caches.

    Args:
        parts: Features of each projection: 2 for sine and cosine, otherwise 1.
        lean: Without the column of ones, and into memory that is used again.
    """
    rows, frequencies, width = sizes.batch * sizes.heads, sizes.frequencies, sizes.head_dim
    features = parts * frequencies
    chunk = min(max(MIN_CHUNK, CHUNK_BYTES // (4 * features * min(rows, 8))), MAX_CHUNK, sizes.length)
    tile = max(1, min(rows, CHUNK_BYTES // (4 * features * chunk)))
    columns = sizes.value_dim + (0 if lean else 1)
    batch = tile if lean else parts * tile
    inner = features if lean else frequencies

    def run() -> None:
        for _ in range(0, rows, tile):
            pieces = _Pieces(tile, batch, chunk, frequencies, inner, width, columns, lean)
            for start in range(0, sizes.length, chunk):
                pieces.forward_and_backward(min(chunk, sizes.length - start))

    return run


class _Pieces:
    """The factors of one tile; what they hold does not matter."""

    def __init__(
        self, tile: int, batch: int, chunk: int, frequencies: int, inner: int, width: int, columns: int, lean: bool
    ) -> None:
        self.phi, self.values = torch.ones(batch, chunk, inner), torch.ones(batch, chunk, columns)
        self.d_scores, self.x = torch.ones(tile, chunk, frequencies), torch.ones(tile, chunk, width)
        self.omega, self.d_omega = torch.ones(tile, frequencies, width), torch.zeros(tile, frequencies, width)
        self.state = torch.zeros(batch, inner, columns)
        #: Memory of the results, by what they are.
        self._results: dict[str, Tensor] | None = {} if lean else None

    def forward_and_backward(self, size: int) -> None:
        """Compute all products of a chunk: keys and queries, forward and backward."""
        phi, values, x, d_scores = (t[:, :size] for t in (self.phi, self.values, self.x, self.d_scores))
        for backward in (False, True):
            for absorbs in (True, False):
                self._multiply("scores", x, self.omega.transpose(1, 2))
                if absorbs:
                    self.state.baddbmm_(phi.transpose(1, 2), values)
                else:
                    self._multiply("values", phi, self.state)
                if backward:
                    self._multiply("features", values, self.state.transpose(1, 2))
                    self._multiply("x", d_scores, self.omega)
                    self.d_omega.baddbmm_(d_scores.transpose(1, 2), x)

    def _multiply(self, name: str, left: Tensor, right: Tensor) -> None:
        if self._results is None:
            torch.bmm(left, right)
            return
        size = (left.shape[0], left.shape[1], right.shape[2])
        if name not in self._results or self._results[name].shape != size:
            self._results[name] = left.new_empty(size)
        torch.bmm(left, right, out=self._results[name])
