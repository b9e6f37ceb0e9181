"""Linear attention with any kernel, and the names of the grid: (distribution of frequencies) x (feature map).

gmm-rks  fastfood-rks  generative-rks  gmm-prf  fastfood-prf  generative-prf      the paper's six, learned
rbf-rks  performer                                                                a fixed Gaussian distribution
linear-elu                                                                        a fixed map without frequencies
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from klformer.attention.base import (
    ATTENTIONS,
    AttentionEntry,
    AttentionMechanism,
    AttentionSizes,
    keyword_options,
)
from klformer.checks import check_choice
from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.kernels import SPECTRA, GaussianSpectrum, Kernel, SpectralDistribution
from klformer.kernels.kernel import Role
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import decoding
from klformer.ops.spectral_product.state import KeyValueState

#: Options of every kernel with frequencies, and of those whose distribution is learned.
FREQUENCY_OPTIONS: Mapping[str, Any] = {"learn_temperature": False, "redraw": True}
LEARNED_OPTIONS: Mapping[str, Any] = {"frozen": False}
#: A learnable distribution gets an attention with each of these.
MAPS_WITH_FREQUENCIES = [name for name in FEATURE_MAPS if FEATURE_MAPS[name].needs_frequencies]


class KernelizedAttention(AttentionMechanism):
    """Attention with a kernel of finitely many features, linear in the length."""

    supports_key_bias = True

    def __init__(self, sizes: AttentionSizes, kernel: Kernel) -> None:
        super().__init__(sizes)
        self.kernel = kernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        return self.kernel.attend(q, k, v, key_mask=key_mask, causal=causal)

    def attend_weighted(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, key_bias: Tensor, causal: bool
    ) -> Tensor:
        return self.kernel.attend(q, k, v, key_mask=key_mask, key_bias=key_bias, causal=causal)

    def features(self, x: Tensor, role: Role) -> Tensor:
        check_choice("role", role, ("query", "key"))
        if x.dim() != 4 or x.shape[1] != self.num_heads or x.shape[3] != self.head_dim:
            expected = f"(batch, {self.num_heads}, length, {self.head_dim})"
            raise ArgumentError(f"x must have shape {expected}, got {tuple(x.shape)}")
        return self.kernel.features(x, role)

    def initial_state(self, batch_size: int) -> KeyValueState:
        return decoding.initial_state(
            self.kernel.present(),
            batch_size=batch_size,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            like=self._anchor,
        )

    def absorb(
        self,
        state: KeyValueState,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> KeyValueState:
        return self.kernel.absorb(self.kernel.present(), state, k, v, key_mask=key_mask, key_bias=key_bias)

    def read(self, state: KeyValueState, q: Tensor) -> Tensor:
        return decoding.read(self.kernel.present(), state, q)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: KeyValueState) -> tuple[Tensor, KeyValueState]:
        present = self.kernel.present()  # once for both
        state = self.kernel.absorb(present, state, k_t, v_t)
        return decoding.read(present, state, q_t), state


def register_spectrum(name: str, spectrum: type[SpectralDistribution]) -> None:
    """Give a learnable distribution a name. Its attentions are called `name-rks` and `name-prf`, and their options are
    the keywords of its constructor besides num_heads and head_dim.

    Raises:
        ArgumentError: a name is taken, or an option has no default.
        ArgumentTypeError: it is not a distribution.
    """
    if not (isinstance(spectrum, type) and issubclass(spectrum, SpectralDistribution)):
        raise ArgumentTypeError(f"spectrum must be a subclass of SpectralDistribution, got {spectrum!r}")
    SPECTRA.add(name, spectrum)
    for feature_map in MAPS_WITH_FREQUENCIES:
        _register_learned(name, feature_map)


def _register_learned(name: str, feature_map: str) -> None:
    summary = f"learned {name} distribution, {feature_map.upper()} features"
    _register_kernel(f"{name}-{feature_map}", SPECTRA[name], feature_map, summary, learned=True)


def _register_kernel(
    name: str,
    spectrum: type[SpectralDistribution] | None,
    feature_map: str,
    summary: str,
    *,
    learned: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Give a name to (distribution x map). Its options are those of both; `defaults` replace their own."""
    kernel_options = dict(FEATURE_MAPS[feature_map].options)
    spectrum_options: dict[str, Any] = {}
    own_defaults = dict(defaults or {})
    if spectrum is not None:
        kernel_options |= FREQUENCY_OPTIONS
        if not spectrum.redraw:  # there is no noise
            del kernel_options["redraw"]
        spectrum_options = keyword_options(spectrum, but=("num_heads", "head_dim"))
        own_defaults = spectrum.defaults_by_map.get(feature_map, {}) | own_defaults
    if learned:
        kernel_options |= LEARNED_OPTIONS
    options = spectrum_options | kernel_options | own_defaults

    def build(sizes: AttentionSizes, **chosen: Any) -> AttentionMechanism:
        values = options | chosen
        made = None
        if spectrum is not None:
            own = {key: values[key] for key in spectrum_options}
            made = spectrum(num_heads=sizes.num_heads, head_dim=sizes.head_dim, **own)
        kernel = Kernel(feature_map, made, **{key: values[key] for key in kernel_options})
        return KernelizedAttention(sizes, kernel)

    ATTENTIONS.add(name, AttentionEntry(build, KernelizedAttention, options, summary))


for _map in MAPS_WITH_FREQUENCIES:
    for _name in SPECTRA:
        _register_learned(_name, _map)
_register_kernel("rbf-rks", GaussianSpectrum, "rks", "fixed Gaussian kernel, RKS features")
_register_kernel(
    "performer",
    GaussianSpectrum,
    "prf",
    "fixed softmax kernel, orthogonal positive features (Performer)",
    defaults={"coupling": "orthogonal", "norm_coefficient": 0.5},
)
_register_kernel("linear-elu", None, "elu", "fixed map elu(x) + 1 (LinearElu)")
