"""Linear attention with any kernel, and the names of the grid: (distribution of frequencies) x (feature map).

gmm-rks  fastfood-rks  generative-rks  gmm-prf  fastfood-prf  generative-prf      the paper's six, learned
rbf-rks  performer                                                                a fixed Gaussian distribution
linear-elu                                                                        a fixed map without frequencies
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from klformer.attention.base import AttentionMechanism, AttentionSizes
from klformer.attention.registry import ATTENTIONS, AttentionEntry, keyword_options
from klformer.attention.spectral import NEAR_GAIN, SpectralAttention
from klformer.checks import check_choice
from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.kernels import SPECTRA, GaussianSpectrum, Kernel, SpectralDistribution
from klformer.kernels.kernel import Role
from klformer.ops.feature_maps import FEATURE_MAPS
from klformer.ops.spectral_product import SpectralKernel

#: Options of every attention with a kernel, of every kernel, of every one with frequencies, and of those whose
#: distribution is learned.
WINDOW_OPTIONS: Mapping[str, Any] = {"window": 0, "near_gain": NEAR_GAIN}
KERNEL_OPTIONS: Mapping[str, Any] = {"backend": "auto"}
FREQUENCY_OPTIONS: Mapping[str, Any] = {"learn_temperature": False, "redraw": True}
LEARNED_OPTIONS: Mapping[str, Any] = {"frozen": False}
#: A learnable distribution gets an attention with each of these.
MAPS_WITH_FREQUENCIES = [name for name in FEATURE_MAPS if FEATURE_MAPS[name].needs_frequencies]


class KernelizedAttention(SpectralAttention):
    """Attention with a kernel of finitely many features, linear in the length.

    Args:
        sizes: Heads, and sizes of queries and values.
        kernel: Made for the same number and size of heads.
        window: Keys on each side of a query that it sees exactly besides, of a kernel with positive features only.
        near_gain: Where the log-gain of these starts.

    Raises:
        ArgumentError: a window beside a kernel that may be negative.

    Examples:
        >>> import torch, klformer
        >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
        >>> type(attention).__name__, type(attention.kernel).__name__
        ('KernelizedAttention', 'Kernel')
    """

    def __init__(self, sizes: AttentionSizes, kernel: Kernel, *, window: int = 0, near_gain: float = NEAR_GAIN) -> None:
        super().__init__(sizes, window=window, near_gain=near_gain)
        if window and not kernel.feature_map.positive:
            raise ArgumentError(
                f"window must be 0 for feature_map {kernel.feature_map.name!r}, got {window}: its estimates may be "
                "negative, and have no logarithm to be merged by; 'prf' has one"
            )
        self.kernel = kernel

    @property
    def backend(self) -> str:
        return self.kernel.backend

    def present(self) -> SpectralKernel:
        return self.kernel.present()

    def key_bias(
        self, present: SpectralKernel, k: Tensor, key_mask: Tensor | None, key_bias: Tensor | None
    ) -> Tensor | None:
        return self.kernel.log_weights(present, k, key_mask, key_bias)

    def query_log_weights(self, present: SpectralKernel, q: Tensor) -> Tensor | None:
        return self.kernel.query_log_weights(present, q)

    def features(self, x: Tensor, role: Role) -> Tensor:
        check_choice("role", role, ("query", "key"))
        self._check_heads("x", x)
        return self.kernel.features(x, role)


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
    kernel_options = {**FEATURE_MAPS[feature_map].options, **KERNEL_OPTIONS}
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
    # Of a window beside a kernel that may be negative, the attention says why not.
    window_options = dict(WINDOW_OPTIONS) if FEATURE_MAPS[feature_map].positive else {"window": 0}
    options = spectrum_options | kernel_options | own_defaults | window_options

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
        of_window = {key: values[key] for key in window_options}
        return KernelizedAttention(sizes, Kernel(feature_map, made, **of_kernel), **of_window)

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
