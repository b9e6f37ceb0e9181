"""Who computes the product. A backend says which calls it can serve and suits; `auto` takes the first that suits.

A fused backend has a backward of its own and goes through one pair of torch custom ops, so that autograd and
torch.compile see the product whole. What it keeps for backward is its own business: `empty` makes room for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.derivatives import attend_plainly
from klformer.ops.spectral_product.operands import SpectralOperands
from klformer.ops.transforms import gradients_of, is_derived_again, is_transformed
from klformer.registry import Registry


class Backend(ABC):
    """A way to compute attention with a spectral kernel.

    Examples:
        >>> import torch
        >>> from klformer.kernels import GaussianSpectrum, Kernel
        >>> from klformer.ops.spectral_product import BACKENDS, SpectralOperands
        >>> kernel = Kernel("prf", GaussianSpectrum(num_heads=2, head_dim=8)).present()
        >>> operands = SpectralOperands(kernel, *torch.randn(3, 1, 2, 5, 8))
        >>> backend = BACKENDS["reference"]
        >>> backend.supports(operands), backend.suits(operands)
        (True, True)
        >>> backend.attend(operands).shape
        torch.Size([1, 2, 5, 8])
    """

    @abstractmethod
    def supports(self, operands: SpectralOperands) -> bool:
        """Whether this backend can compute the product of these operands.

        Args:
            operands: The kernel, and q (B, H, L, D), k (B, H, S, D) and v (B, H, S, E).

        Returns:
            True or False. Nothing is computed.
        """

    def suits(self, operands: SpectralOperands) -> bool:
        """Whether `auto` is to take this backend, if no other comes before it.

        Args:
            operands: As in `supports`.
        """
        return self.supports(operands)

    @abstractmethod
    def attend(self, operands: SpectralOperands) -> Tensor:
        """The product, differentiable in every operand.

        Args:
            operands: Some that this backend supports.

        Returns:
            (B, H, L, E), in the type of v.
        """


class FusedBackend(Backend):
    """A backend with a backward of its own.

    A subclass has `supports`, `empty`, `forward` and `backward`. `attend` makes one op of them for autograd and
    torch.compile.

    Args:
        name: What it is registered as; its op finds it by this name.

    Examples:
        A backend that leaves the work to another one, and is asked for by its name:

        >>> import torch, klformer
        >>> from klformer.ops.spectral_product import BACKENDS, FusedBackend
        >>> class Borrowed(FusedBackend):
        ...     def supports(self, operands):
        ...         return BACKENDS["chunked"].supports(operands)
        ...
        ...     def suits(self, operands):
        ...         return False  # never by itself
        ...
        ...     def empty(self, operands):
        ...         return BACKENDS["chunked"].empty(operands)
        ...
        ...     def forward(self, operands):
        ...         return BACKENDS["chunked"].forward(operands)
        ...
        ...     def backward(self, operands, saved, d_out, needed):
        ...         return BACKENDS["chunked"].backward(operands, saved, d_out, needed)
        >>> BACKENDS.add("borrowed", Borrowed("borrowed"))
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> klformer.spectral_product(q, k, v, torch.randn(2, 16, 8), feature_map="prf", backend="borrowed").shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def attend(self, operands: SpectralOperands) -> Tensor:
        named = operands.tensors()
        # ONNX has no op of ours: the product is written in its own.
        if is_transformed(*named.values()) or torch.onnx.is_in_onnx_export():
            return attend_plainly(operands)
        return _forward_op(list(named.values()), ",".join(named), operands.map_code, operands.causal, self.name)[0]

    @abstractmethod
    def empty(self, operands: SpectralOperands) -> list[Tensor]:
        """Room for the result, first, and for what forward leaves for backward.

        Args:
            operands: Some that this backend supports.

        Returns:
            Uninitialised tensors of the right shapes and types. torch.compile sees them in place of `forward`.
        """

    @abstractmethod
    def forward(self, operands: SpectralOperands) -> list[Tensor]:
        """What `empty` makes room for, filled.

        Args:
            operands: Some that this backend supports.

        Returns:
            The result (B, H, L, E), and what `backward` needs besides the operands.
        """

    @abstractmethod
    def backward(
        self, operands: SpectralOperands, saved: Sequence[Tensor], d_out: Tensor, needed: Collection[str]
    ) -> dict[str, Tensor]:
        """Gradients of the operands that are needed.

        Args:
            operands: Those of `forward`.
            saved: What `forward` gave, the result included.
            d_out: The gradient of the result, (B, H, L, E).
            needed: Names of operands, such as "q", "omega" or "key_bias".

        Returns:
            Gradients by name, in the shapes of the operands; of "key_bias" in the full shape (B, H, S).
        """


BACKENDS: Registry[Backend] = Registry("backend")
"""All backends by name, in the order in which `auto` asks whether they suit.

`BACKENDS.add("name", Class("name"))` registers one of your own; see `FusedBackend`.

Examples:
    >>> from klformer.ops.spectral_product import BACKENDS
    >>> "chunked" in BACKENDS, BACKENDS["chunked"].name
    (True, 'chunked')
"""


def choose_backend(name: str, operands: SpectralOperands) -> Backend:
    """The backend called `name`; for "auto" the first that suits the call.

    Raises:
        ArgumentError: there is no such backend, or it can't serve the call.
    """
    if name == "auto":
        return next(backend for backend in map(BACKENDS.__getitem__, BACKENDS) if backend.suits(operands))
    backend = BACKENDS[name]
    if not backend.supports(operands):
        direction = "causal" if operands.causal else "bidirectional"
        gradients = " and its gradients" if operands.wants_gradients else ""
        raise ArgumentError(
            f"backend {name!r} can't compute a {direction} product with feature_map {operands.feature_map.name!r}"
            f"{gradients}; 'auto' chooses one that can"
        )
    return backend


def _open(
    names: str, tensors: Sequence[Tensor], feature_map: str, causal: bool, backend: str
) -> tuple[FusedBackend, SpectralOperands]:
    """A call of an op as its backend takes it."""
    chosen = BACKENDS[backend]
    assert isinstance(chosen, FusedBackend)
    return chosen, SpectralOperands.from_tensors(names.split(","), tensors, feature_map, causal=causal)


@torch.library.custom_op("klformer::spectral_product", mutates_args=())
def _forward_op(tensors: Sequence[Tensor], names: str, feature_map: str, causal: bool, backend: str) -> list[Tensor]:
    chosen, operands = _open(names, tensors, feature_map, causal, backend)
    with full_precision(operands.q):
        return chosen.forward(operands.weighted())


@_forward_op.register_fake
def _(tensors, names, feature_map, causal, backend):  # type: ignore[no-untyped-def]
    chosen, operands = _open(names, tensors, feature_map, causal, backend)
    return chosen.empty(operands.weighted())


@torch.library.custom_op("klformer::spectral_product_backward", mutates_args=())
def _backward_op(
    d_out: Tensor,
    saved: Sequence[Tensor],
    tensors: Sequence[Tensor],
    names: str,
    feature_map: str,
    causal: bool,
    backend: str,
    needed: str,
) -> list[Tensor]:
    chosen, operands = _open(names, tensors, feature_map, causal, backend)
    wanted = set(needed.split(","))
    with full_precision(d_out):
        of_envelope = {"key_bias"} if operands.norm_coefficient and "k" in wanted else set()
        gradients = chosen.backward(operands.weighted(), saved, d_out, wanted | of_envelope)
        if of_envelope:
            _add_gradient_of_norms(gradients["k"], operands, gradients["key_bias"])
        if operands.key_bias is not None and "key_bias" in wanted:
            gradients["key_bias"] = gradients["key_bias"].sum_to_size(operands.key_bias.shape)
    return [gradients[name].to(tensor.dtype) for name, tensor in operands.tensors().items() if name in wanted]


#: Keys that are looked at together where their norms are differentiated.
_KEYS_AT_A_TIME = 1024


def _add_gradient_of_norms(d_k: Tensor, operands: SpectralOperands, d_bias: Tensor) -> None:
    """Adds the gradient of -c |k|^2 to that of the keys in place: another tensor of their size would be a quarter of
    all that a step needs."""
    for start in range(0, d_k.shape[2], _KEYS_AT_A_TIME):
        here = slice(start, start + _KEYS_AT_A_TIME)
        keys = operands.k[:, :, here].to(d_k.dtype)
        if operands.key_mask is not None:
            keys = keys.masked_fill(~operands.key_mask[:, :, here].unsqueeze(-1), 0)
        d_k[:, :, here].addcmul_(keys, d_bias[:, :, here].unsqueeze(-1), value=-2 * operands.norm_coefficient)


@_backward_op.register_fake
def _(d_out, saved, tensors, names, feature_map, causal, backend, needed):  # type: ignore[no-untyped-def]
    named = zip(names.split(","), tensors, strict=True)
    wanted = needed.split(",")
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for name, x in named if name in wanted]


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    tensors, ctx.names, ctx.feature_map, ctx.causal, ctx.backend = inputs
    ctx.num_operands = len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _autograd(ctx, d_outputs):  # type: ignore[no-untyped-def]
    d_out, needs = d_outputs[0], ctx.needs_input_grad[0]
    if d_out is None or not any(needs):
        return [None] * ctx.num_operands, None, None, None, None
    tensors = ctx.saved_tensors
    if is_derived_again(d_out):

        def product(operands):  # type: ignore[no-untyped-def]
            return attend_plainly(_open(ctx.names, operands, ctx.feature_map, ctx.causal, ctx.backend)[1])

        return gradients_of(product, tensors[: ctx.num_operands], needs, d_out), None, None, None, None
    operands, saved = list(tensors[: ctx.num_operands]), list(tensors[ctx.num_operands :])
    needed = ",".join(name for name, is_needed in zip(ctx.names.split(","), needs, strict=True) if is_needed)
    found = iter(_backward_op(d_out, saved, operands, ctx.names, ctx.feature_map, ctx.causal, ctx.backend, needed))
    return [next(found) if is_needed else None for is_needed in needs], None, None, None, None


_forward_op.register_autograd(_autograd, setup_context=_setup_context)
