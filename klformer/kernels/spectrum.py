"""Where the frequencies come from: the abstract spectral distribution, and the registry of the learnable ones.

A shift-invariant kernel is the Fourier transform of a distribution of frequencies (Bochner; Eq. 2 of the paper). To
learn the kernel is to learn the distribution. A new one is a subclass with `resample` and `frequencies`, and a line:

    klformer.register_spectrum("name", Class)

Its attentions `name-rks` and `name-prf`, their options and every contract test follow from that.
"""

from abc import abstractmethod
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from klformer.checks import check_count
from klformer.noise import Resampled
from klformer.ops.feature_maps import FeatureMap
from klformer.registry import Registry


class SpectralDistribution(Resampled):
    """A distribution of frequencies omega in R^D, one for each head or one for all.

    Noise lives in persistent buffers and changes in `resample` only: never in a forward pass. A state dict therefore
    reproduces the kernel exactly.

    Args:
        num_heads: Heads H.
        head_dim: Size D of a frequency.
        num_frequencies: Frequencies R in a sample, all components together.

    Raises:
        ArgumentError: a size is not a whole number of at least 1.

    Examples:
        Frequencies that are uniform in a box, whose sides are learned:

        >>> import torch, klformer
        >>> class Box(klformer.SpectralDistribution):
        ...     def __init__(self, *, num_heads, head_dim, num_frequencies=16):
        ...         super().__init__(num_heads=num_heads, head_dim=head_dim, num_frequencies=num_frequencies)
        ...         self.sides = torch.nn.Parameter(torch.ones(num_heads, 1, head_dim))
        ...         self.register_buffer("noise", torch.empty(num_frequencies, head_dim))
        ...         self.resample()
        ...
        ...     @torch.no_grad()
        ...     def resample(self, generator=None):
        ...         self.noise.copy_(2 * torch.rand(self.noise.shape, generator=generator) - 1)
        ...
        ...     def frequencies(self):
        ...         return self.noise * self.sides
        >>> klformer.register_spectrum("box", Box)
        >>> attention = klformer.build_attention("box-prf", num_heads=2, head_dim=8)

        What the kernel asks of it:

        >>> box = attention.kernel.spectrum
        >>> box.resample(torch.Generator().manual_seed(1))
        >>> box.frequencies().shape, box.anchor().dtype
        (torch.Size([2, 16, 8]), torch.float32)
        >>> box.log_weights(), box.paired_frequencies(), box.linear_map()
        (None, None, None)
    """

    #: Defaults of options that depend on the feature map: {"prf": {"option": value}}.
    defaults_by_map: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, *, num_heads: int, head_dim: int, num_frequencies: int) -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        check_count("head_dim", head_dim)
        check_count("num_frequencies", num_frequencies)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_frequencies = num_frequencies

    @abstractmethod
    def frequencies(self) -> Tensor:
        """Omega, differentiable in the parameters.

        Returns:
            (H or 1, R, D).
        """

    def log_weights(self) -> Tensor | None:
        """Logarithms of the frequencies' weights.

        Returns:
            (H or 1, R), differentiable; None if all weigh the same.
        """
        return None

    def paired_frequencies(self) -> tuple[Tensor, Tensor] | None:
        """Frequencies in pairs omega + offset and omega - offset with equal weights: a form that costs RKS half.

        Returns:
            Omega (H or 1, R / 2, D) and the offset (H or 1, D); None if they do not come in pairs.
        """
        return None

    def linear_map(self) -> Tensor | None:
        """M if the frequencies are M^T n + mean with n ~ N(0, I), one M for all.

        Returns:
            (H or 1, D, D); None otherwise.
        """
        return None

    def check_map(self, feature_map: FeatureMap) -> None:
        """Called when a kernel is made with this map.

        Args:
            feature_map: That of the kernel.

        Raises:
            ArgumentError: an option of the distribution makes no sense with the map.

        Examples:
            >>> from klformer.kernels import GaussianSpectrum
            >>> from klformer.ops.feature_maps import FEATURE_MAPS
            >>> GaussianSpectrum(num_heads=2, head_dim=8).check_map(FEATURE_MAPS["prf"])  # nothing is wrong
        """

    def anchor(self) -> Tensor:
        """A tensor that tells the device and the precision that the module was moved to."""
        tensors = (x for x in chain(self.buffers(), self.parameters()) if x.is_floating_point())
        return next(tensors, torch.empty(()))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_frequencies={self.num_frequencies}"


SPECTRA: Registry[type[SpectralDistribution]] = Registry("kernel")
"""Learnable distributions of frequencies by name; `register_spectrum` adds one."""
