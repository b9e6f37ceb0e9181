"""Who computes a call: backends by name, the choice among them, and what was chosen.

A backend says why it can't serve a call, or nothing. `auto` takes the backend with the highest priority that has
nothing to say and was right on this device (`self_check.py`); a backend that is asked for by name and can't serve is an
error that quotes its reason. Forward-mode derivatives, torch.func's transforms and programs for ONNX are made of plain
operations, whoever was asked for.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.ops.spectral_product.operands import Call, Sums
from klformer.ops.transforms import is_transformed
from klformer.registry import Registry


class Backend(ABC):
    """A way to compute attention with a spectral kernel: three steps, differentiable in every tensor of the call.

    One with a backward of its own is a `FusedBackend` (`autograd.py`); this class is for steps that autograd can
    follow by itself.

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianSpectrum, Kernel
        >>> from klformer.ops.spectral_product import BACKENDS, Call
        >>> kernel = Kernel("prf", GaussianSpectrum(num_heads=2, head_dim=8)).present()
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> backend = BACKENDS["reference"]
        >>> backend.supports(Call("product", kernel, q=q, k=k, v=v)) is None
        True
        >>> out, log_sum = backend.product(Call("product", kernel, q=q, k=k, v=v))
        >>> sums = backend.absorb(Call("absorb", kernel, k=k, v=v))
        >>> torch.allclose(backend.read(Call("read", kernel, q=q, sums=sums))[0], out, atol=1e-5)
        True
        >>> out, log_sum, after = backend.causal(Call("causal", kernel, q=q, k=k, v=v, sums=sums))
        >>> log_sum.shape, after.values.shape
        (torch.Size([1, 2, 5]), torch.Size([1, 2, 256, 8]))
    """

    #: What it is registered as.
    name: str = ""
    #: `auto` takes the highest that supports a call; `chunked` has 0.
    priority: int = 0

    @abstractmethod
    def supports(self, call: Call) -> str | None:
        """Say why this backend can't compute a call. Computes nothing.

        Args:
            call: Of any step.

        Returns:
            The reason; None if it can.
        """

    def product(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the result of all queries against all keys: `absorb`, then `read`.

        Args:
            call: Queries, keys and values.

        Returns:
            The result (B, H, L, E) in the type of q, and the logarithms of the denominators (B, H, L).
        """
        sums = self.absorb(replace(call, step="absorb", q=None))
        return self.read(Call("read", call.kernel, q=call.q, sums=sums))

    @abstractmethod
    def absorb(self, call: Call) -> Sums:
        """Add up keys and values.

        Args:
            call: Keys and values.

        Returns:
            The sums, which may be relative to any log-scale.
        """

    @abstractmethod
    def read(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the result of queries against sums.

        Args:
            call: Queries and sums.

        Returns:
            The result (B, H, L, E) in the type of q, and the logarithms of the denominators (B, H, L).
        """

    @abstractmethod
    def causal(self, call: Call) -> tuple[Tensor, Tensor, Sums]:
        """Return the result of every query against the keys up to it, and the sums that are left.

        Args:
            call: As many queries as keys, and the sums of keys that came before, if there are any.

        Returns:
            The result (B, H, L, E), the logarithms of the denominators (B, H, L), and the sums of all keys.
        """


BACKENDS: Registry[Backend] = Registry("backend")
"""All backends by name.

Examples:
    >>> from klformer.ops.spectral_product import BACKENDS
    >>> "chunked" in BACKENDS, BACKENDS["chunked"].name
    (True, 'chunked')
"""

#: All backends, the highest priority first.
_by_priority: list[Backend] = []
#: What "auto" stands for in processes that a command starts.
VARIABLE = "KLFORMER_BACKEND"
#: Set to 0, `auto` takes backends without having checked them on the device (`self_check.py`).
SELF_CHECK = "KLFORMER_SELF_CHECK"
_asked_for: ContextVar[str | None] = ContextVar("backend", default=None)
_served: ContextVar[Counter[tuple[str, str]] | None] = ContextVar("served", default=None)


def register_backend(name: str, backend: Backend) -> None:
    """Give a backend a name. By its priority it serves every layer, run and conversion; by its name whoever asks.

    Args:
        name: Of the backend.
        backend: It.

    Raises:
        ArgumentError: the name is taken.
        ArgumentTypeError: it is not a backend.

    Examples:
        >>> import klformer
        >>> from klformer.ops.spectral_product import BACKENDS
        >>> klformer.register_backend("copy", type(BACKENDS["chunked"])())
        >>> BACKENDS["copy"].name
        'copy'
    """
    if not isinstance(backend, Backend):
        raise ArgumentTypeError(f"backend must be a klformer Backend, got {backend!r}")
    if name == "auto":
        raise ArgumentError("a backend can't be called 'auto', which stands for the choice among all")
    BACKENDS.add(name, backend)
    backend.name = name
    _by_priority[:] = sorted((BACKENDS[name] for name in BACKENDS), key=lambda backend: -backend.priority)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make every product inside that asks for "auto" ask for a backend by name.

    Args:
        name: Of a backend, or "auto".

    Raises:
        ArgumentError: there is no such backend.

    Examples:
        >>> import torch, klformer
        >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
        >>> with klformer.use_backend("reference"), klformer.record_backends() as served:
        ...     out = attention(*torch.randn(3, 1, 2, 5, 8))
        >>> served
        Counter({('product', 'reference'): 1})
    """
    if name != "auto":
        BACKENDS[name]
    token = _asked_for.set(name)
    try:
        yield
    finally:
        _asked_for.reset(token)


@contextmanager
def record_backends() -> Iterator[Counter[tuple[str, str]]]:
    """Count which backend served which step of the products inside; those in compiled programs are not seen.

    Yields:
        How often, by (step, name of the backend).

    Examples:
        >>> import torch, klformer
        >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
        >>> with klformer.record_backends() as served:
        ...     out = attention(*torch.randn(3, 1, 2, 5, 8), causal=True)
        >>> served
        Counter({('causal', 'chunked'): 1})
    """
    served: Counter[tuple[str, str]] = Counter()
    token = _served.set(served)
    try:
        yield served
    finally:
        _served.reset(token)


def explain_backends(call: Call) -> dict[str, str | None]:
    """Say for every backend why it can't serve a call.

    Args:
        call: Of any step.

    Returns:
        Reasons by name, None for who can, in the order in which `auto` asks.

    Raises:
        ArgumentError: never; a backend that is asked for by name and can't serve raises when it is called.

    Examples:
        >>> import torch
        >>> from klformer.ops.feature_maps import FEATURE_MAPS
        >>> from klformer.ops.spectral_product import Call, SpectralKernel, explain_backends
        >>> kernel = SpectralKernel(FEATURE_MAPS["elu"])
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> explain_backends(Call("product", kernel, q=q, k=k, v=v))["flash"]
        "feature_map 'elu' is not exponential"
    """
    return {backend.name: backend.supports(call) for backend in _by_priority}


def choose_backend(call: Call, name: str = "auto") -> Backend:
    """Return the backend called `name`; for "auto" the one with the highest priority that supports the call.

    Raises:
        ArgumentError: there is no such backend, or it can't serve the call.
    """
    chosen = _choose(call, asked_for() if name == "auto" else name)
    if not torch.compiler.is_compiling():
        served = _served.get()
        if served is not None:
            served[call.step, chosen.name] += 1
    return chosen


def _choose(call: Call, name: str) -> Backend:
    if torch.onnx.is_in_onnx_export() or is_transformed(*call.tensors().values()):
        return BACKENDS["plain"]
    if name == "auto":
        for backend in _by_priority:
            if backend.supports(call) is None and (backend.name == "chunked" or _is_proven(backend, call)):
                return backend
    backend = BACKENDS[name]
    if (reason := backend.supports(call)) is not None:
        raise ArgumentError(f"backend {name!r} can't serve this {call.step}: {reason}. 'auto' chooses one that can")
    return backend


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def asked_for() -> str:
    """Return the name of the backend that "auto" stands for here."""
    return _asked_for.get() or os.environ.get(VARIABLE, "auto")


def _is_proven(backend: Backend, call: Call) -> bool:
    """Return whether a backend is right on the device of a call: it has shown it there, or need not."""
    if os.environ.get(SELF_CHECK) == "0" or call.device.type == "meta":
        return True
    if not torch.compiler.is_compiling() and isinstance(call.tokens, FakeTensor):
        return True  # nothing is computed
    return _is_proven_on(backend.name, call.feature_map.name, call.device.type, call.device.index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_proven_on(name: str, feature_map: str, device_type: str, index: int | None) -> bool:
    from klformer.ops.spectral_product.self_check import is_right

    device = torch.device(device_type) if index is None else torch.device(device_type, index)
    return is_right(BACKENDS[name], feature_map, device)
