"""Linear attention with any kernel, and the names of the grid: (distribution of frequencies) x (feature map).

gmm-rks  fastfood-rks  generative-rks  gmm-prf  fastfood-prf  generative-prf      the paper's six, learned
rbf-rks  performer                                                                a fixed Gaussian distribution
linear-elu                                                                        a fixed map without frequencies
"""

import inspect
from typing import Any, Literal

from torch import Tensor

from klformer.attention.base import ATTENTIONS, AttentionEntry, AttentionMechanism
from klformer.checks import check_choice
from klformer.errors import ArgumentError
from klformer.kernels import SPECTRA, GaussianSpectrum, Kernel, SpectralDistribution
from klformer.ops.decoding import SpectralState

#: Options of a kernel by its map. RKS is smoothed by 1, as in the authors' code: see docs/decisions.md for what
#: happens without.
MAP_OPTIONS: dict[str, dict[str, Any]] = {
    "rks": {"smoothing": 1.0},
    "prf": {"norm_coefficient": 1.0},
}
#: Options of every kernel whose distribution is learned.
LEARNED_OPTIONS: dict[str, Any] = {"frozen": False}


class KernelizedAttention(AttentionMechanism):
    """Attention with a kernel of finitely many features, linear in the length."""

    def __init__(
        self, kernel: Kernel, *, num_heads: int, head_dim: int, value_dim: int | None = None, max_len: int | None = None
    ) -> None:
        super().__init__(num_heads=num_heads, head_dim=head_dim, value_dim=value_dim, max_len=max_len)
        self.kernel = kernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        return self.kernel.attend(q, k, v, key_mask=key_mask, causal=causal)

    def features(self, x: Tensor, role: Literal["query", "key"] = "query") -> Tensor:
        """Explicit features; the same for queries and keys, whose maps differ in no kernel so far."""
        check_choice("role", role, ("query", "key"))
        if x.dim() != 4 or x.shape[1] != self.num_heads or x.shape[3] != self.head_dim:
            expected = f"(batch, {self.num_heads}, length, {self.head_dim})"
            raise ArgumentError(f"x must have shape {expected}, got {tuple(x.shape)}")
        return self.kernel.features(x)

    def initial_state(self, batch_size: int) -> SpectralState:
        return self.kernel.decoder().initial_state(
            batch_size, self.num_heads, self.head_dim, self.value_dim, self._anchor
        )

    def absorb(self, state: SpectralState, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> SpectralState:
        return self.kernel.decoder().absorb(state, k, v, key_mask)

    def read(self, state: SpectralState, q: Tensor) -> Tensor:
        return self.kernel.decoder().read(state, q)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: SpectralState) -> tuple[Tensor, SpectralState]:
        decoder = self.kernel.decoder()  # once for both
        state = decoder.absorb(state, k_t, v_t)
        return decoder.read(state, q_t), state


def register_kernel(
    name: str,
    spectrum: type[SpectralDistribution] | None,
    feature_map: str,
    summary: str,
    *,
    learned: bool = False,
    **defaults: Any,
) -> None:
    """Give a name to (distribution x map). Its options are those of both; `defaults` replace the distribution's own."""
    kernel_options = MAP_OPTIONS.get(feature_map, {}) | (LEARNED_OPTIONS if learned else {})
    spectrum_options: dict[str, Any] = {}
    if spectrum is not None:
        parameters = inspect.signature(spectrum).parameters
        spectrum_options = {key: p.default for key, p in parameters.items() if key not in ("num_heads", "head_dim")}
        spectrum_options |= spectrum.defaults_by_map.get(feature_map, {})
    options = spectrum_options | kernel_options | defaults

    def build(
        *, num_heads: int, head_dim: int, value_dim: int | None, max_len: int | None, **chosen: Any
    ) -> AttentionMechanism:
        values = options | chosen
        made = None
        if spectrum is not None:
            made = spectrum(num_heads=num_heads, head_dim=head_dim, **{key: values[key] for key in spectrum_options})
        kernel = Kernel(feature_map, made, **{key: values[key] for key in kernel_options})
        return KernelizedAttention(kernel, num_heads=num_heads, head_dim=head_dim, value_dim=value_dim, max_len=max_len)

    ATTENTIONS.add(name, AttentionEntry(build, options, summary))


for _map in ("rks", "prf"):
    for _name in SPECTRA:
        register_kernel(
            f"{_name}-{_map}",
            SPECTRA[_name],
            _map,
            f"learned {_name} distribution, {_map.upper()} features",
            learned=True,
        )
register_kernel("rbf-rks", GaussianSpectrum, "rks", "fixed Gaussian kernel, RKS features")
register_kernel(
    "performer",
    GaussianSpectrum,
    "prf",
    "fixed softmax kernel, orthogonal positive features (Performer)",
    coupling="orthogonal",
    norm_coefficient=0.5,
)
register_kernel("linear-elu", None, "elu", "fixed map elu(x) + 1 (LinearElu)")
