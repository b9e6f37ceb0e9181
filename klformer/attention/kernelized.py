"""Linear attention with any kernel, and the names of the grid: (distribution of frequencies) x (feature map).

gmm-rks  fastfood-rks  generative-rks  gmm-prf  fastfood-prf  generative-prf      the paper's six, learned
rbf-rks  performer                                                                a fixed Gaussian distribution
linear-elu                                                                        a fixed map without frequencies
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import ATTENTIONS, AttentionEntry, keyword_options
from klformer.checks import check_choice
from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.kernels import SPECTRA, GaussianSpectrum, Kernel, SpectralDistribution
from klformer.kernels.kernel import Role
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.shapes import check_key_bias
from klformer.ops.spectral_product import kept_keys
from klformer.ops.spectral_product.decoding import PreparedKernel
from klformer.ops.spectral_product.key_values import KeyValueState
from klformer.ops.spectral_product.parts import PartProduct
from klformer.ops.spectral_product.state import KernelState

#: Options of every kernel with frequencies, and of those whose distribution is learned.
FREQUENCY_OPTIONS: Mapping[str, Any] = {"learn_temperature": False, "redraw": True}
LEARNED_OPTIONS: Mapping[str, Any] = {"frozen": False}
#: A learnable distribution gets an attention with each of these.
MAPS_WITH_FREQUENCIES = [name for name in FEATURE_MAPS if FEATURE_MAPS[name].needs_frequencies]


class KernelizedAttention(AttentionMechanism):
    """Attention with a kernel of finitely many features, linear in the length.

    Args:
        sizes: Heads, and sizes of queries and values.
        kernel: Made for the same number and size of heads.

    Examples:
        >>> import torch, klformer
        >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
        >>> type(attention).__name__, type(attention.kernel).__name__
        ('KernelizedAttention', 'Kernel')
    """

    supports_key_bias = True
    supports_parts = True

    def __init__(self, sizes: AttentionSizes, kernel: Kernel) -> None:
        super().__init__(sizes)
        self.kernel = kernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        if self.parts is not None:
            return self.finish(self.begin(k, v, key_mask=key_mask, causal=causal), q)
        return self.kernel.attend(q, k, v, key_mask=key_mask, causal=causal)

    def attend_weighted(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, key_bias: Tensor, causal: bool
    ) -> Tensor:
        if self.parts is not None:
            return self.finish(self.begin(k, v, key_mask=key_mask, key_bias=key_bias, causal=causal), q)
        return self.kernel.attend(q, k, v, key_mask=key_mask, key_bias=key_bias, causal=causal)

    def begin(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None, causal: bool
    ) -> PartProduct:
        self._check_operands(k, k, v, key_mask, causal)
        parts = self._known_parts()
        return self.kernel.begin(k, v, key_mask=key_mask, key_bias=key_bias, causal=causal, parts=parts)

    def features(self, x: Tensor, role: Role) -> Tensor:
        check_choice("role", role, ("query", "key"))
        self._check_heads("x", x)
        return self.kernel.features(x, role)

    def initial_state(self, batch_size: int) -> KeyValueState:
        return self._prepare().initial_state(batch_size, self.value_dim)

    def prepare_decoding(self, batch_size: int) -> "DecodingState":
        prepared = self._prepare()
        return DecodingState(prepared, prepared.initial_state(batch_size, self.value_dim))

    def absorb(
        self,
        state: "KeyValueState | DecodingState",
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> "KeyValueState | DecodingState":
        """The state after more keys and values. For inference: no gradients.

        Args:
            state: Of `initial_state`, which stays as it is, or of `prepare_decoding`, which is changed.
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S).

        Raises:
            ArgumentError: shapes do not fit the attention, each other, or the state.
        """
        self._check_operands(k, k, v, key_mask, causal=False)
        own = self._own(state)
        self._add(own, k, v, key_mask, key_bias)
        return state if isinstance(state, DecodingState) else own.state

    def read(self, state: "KeyValueState | DecodingState", q: Tensor) -> Tensor:
        self._check_heads("q", q)
        if isinstance(state, DecodingState):
            return state.prepared.read(state.state, q)
        return self._prepare().read(state, q)

    def merge(self, first: "KeyValueState | DecodingState", second: "KeyValueState | DecodingState") -> KeyValueState:
        left, right = (state.state if isinstance(state, DecodingState) else state for state in (first, second))
        if left.product.shape != right.product.shape:
            shapes = f"{tuple(left.product.shape)} and {tuple(right.product.shape)}"
            raise ArgumentError(f"states of one attention and of as many sequences can be merged, got {shapes}")
        return self._prepare().merged(left, right)

    @torch.no_grad()
    def kernel_state(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None
    ) -> KernelState:
        """The state of keys and values with the present frequencies, as a value.

        It can be read from, merged and written to a file. The kernel's envelope is in it.

        Args:
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S).

        Raises:
            ArgumentError: shapes do not fit the attention, or each other.

        Examples:
            >>> import torch, klformer
            >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
            >>> k, v, q = torch.randn(3, 1, 2, 50, 8)
            >>> state = attention.kernel_state(k, v)
            >>> torch.allclose(state.read(q), attention(q, k, v), atol=1e-5)
            True
        """
        self._check_operands(k, k, v, key_mask, causal=False)
        check_key_bias(key_bias, k)
        present = self.kernel.present()
        bias = self.kernel.log_weights(present, k, kept_keys(key_mask, key_bias), key_bias)
        empty = KernelState.empty(
            present, like=k, batch_size=k.shape[0], num_heads=self.num_heads, value_dim=self.value_dim
        )
        return empty.absorb(k, v, key_mask=key_mask, key_bias=bias)

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: "KeyValueState | DecodingState"
    ) -> "tuple[Tensor, KeyValueState | DecodingState]":
        own = self._own(state)
        norm = self.kernel.number_for_norms()
        if norm is None:
            bias = self.kernel.log_weights(own.prepared.kernel, k_t, None)
            out = own.prepared.step(own.state, q_t, k_t, v_t, bias)
        else:
            out = own.prepared.step(own.state, q_t, k_t, v_t, norm_coefficient=norm)
        return out, state if isinstance(state, DecodingState) else own.state

    def _own(self, state: "KeyValueState | DecodingState") -> "DecodingState":
        """A state that may be changed: the prepared one, or a copy of one that stays as it is."""
        return state if isinstance(state, DecodingState) else DecodingState(self._prepare(), state.clone())

    def _check_heads(self, name: str, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.num_heads or x.shape[3] != self.head_dim:
            expected = f"(batch, {self.num_heads}, length, {self.head_dim})"
            raise ArgumentError(f"{name} must have shape {expected}, got {tuple(x.shape)}")

    @torch.no_grad()
    def _prepare(self) -> PreparedKernel:
        return PreparedKernel.of(
            self.kernel.present(), num_heads=self.num_heads, head_dim=self.head_dim, like=self._anchor
        )

    @torch.no_grad()
    def _add(
        self, own: "DecodingState", k: Tensor, v: Tensor, key_mask: Tensor | None, key_bias: Tensor | None
    ) -> None:
        mask = kept_keys(key_mask, key_bias)
        bias = self.kernel.log_weights(own.prepared.kernel, k, mask, key_bias)
        own.prepared.absorb(own.state, k, v, key_mask=mask, key_bias=bias)


@dataclass(frozen=True)
class DecodingState:
    """A state that is changed in place, and the kernel as it was when decoding began."""

    prepared: PreparedKernel
    state: KeyValueState


def register_spectrum(name: str, spectrum: type[SpectralDistribution]) -> None:
    """Give a learnable distribution a name. Its attentions are called `name-rks` and `name-prf`, and their options are
    the keywords of its constructor besides num_heads and head_dim.

    Args:
        name: Of the distribution.
        spectrum: A subclass of `SpectralDistribution`; its docstring has an example.

    Raises:
        ArgumentError: a name is taken, or an option has no default.
        ArgumentTypeError: it is not a distribution.

    Examples:
        >>> import klformer
        >>> from klformer.kernels import GaussianSpectrum
        >>> klformer.register_spectrum("bell", GaussianSpectrum)
        >>> [name for name in klformer.attention_names() if "bell" in name]
        ['bell-rks', 'bell-prf']
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
        of_kernel = {key: values[key] for key in kernel_options}
        # The default of a name, such as performer's, is for its own envelope.
        is_default = of_kernel.get("norm_coefficient") == options.get("norm_coefficient")
        if of_kernel.get("envelope", "gaussian") != "gaussian" and is_default:
            del of_kernel["norm_coefficient"]
        return KernelizedAttention(sizes, Kernel(feature_map, made, **of_kernel))

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
