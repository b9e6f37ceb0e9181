"""Backends with a backward of their own: what autograd, torch.compile and torch.export see of them.

A call is one node of autograd's graph: its tensors go in, the result and the sums come out, with what the backend wants
to see again in backward. In eager mode the node is a torch.autograd.Function, which costs the least; compiled and
exported programs hold the op `klformer::spectral_product`, whose schema is the fields of a `Call`. Where nobody wants
gradients, nothing is kept. Gradients of gradients are taken of plain operations (`plain.py`).
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.precision import full_precision
from klformer.ops.spectral_product import plain
from klformer.ops.spectral_product.dispatch import BACKENDS, Backend, choose_backend
from klformer.ops.spectral_product.operands import TENSORS, Call, Step, Sums
from klformer.ops.transforms import gradients_of, is_derived_again

#: Results of each step: out and log_sum, then the sums.
NUM_RESULTS = {"product": 2, "absorb": 3, "read": 2, "causal": 5}
#: Tensors that a read does not have.
OF_KEYS = {"k", "v", "key_bias"}


class FusedBackend(Backend):
    """A backend with a backward of its own. A subclass has `supports`, `forward`, `backward`, and `empty_kept` if
    `forward` keeps anything.

    Examples:
        A backend that leaves the work to another one:

        >>> import torch, klformer
        >>> from klformer.ops.spectral_product import BACKENDS, Call, FusedBackend
        >>> class Borrowed(FusedBackend):
        ...     priority = -5  # below `chunked`: never by itself
        ...
        ...     def supports(self, call):
        ...         return None if call.feature_map.name == "prf" else "it is for prf"
        ...
        ...     def empty_kept(self, call):
        ...         return BACKENDS["chunked"].empty_kept(call)
        ...
        ...     def forward(self, call, *, keep):
        ...         return BACKENDS["chunked"].forward(call, keep=keep)
        ...
        ...     def backward(self, call, outputs, d_results, needed):
        ...         return BACKENDS["chunked"].backward(call, outputs, d_results, needed)
        >>> klformer.register_backend("borrowed", Borrowed())
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> klformer.spectral_product(q, k, v, torch.randn(2, 16, 8), feature_map="prf", backend="borrowed").shape
        torch.Size([1, 2, 5, 8])

        Its steps are a node of autograd each:

        >>> kernel = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8).kernel.present()
        >>> [x.grad_fn is not None for x in BACKENDS["borrowed"].run(Call("absorb", kernel, k=k, v=v))[:3]]
        [True, True, False]

        Without autograd, a whole product and its gradients; here as one of several sets of keys:

        >>> call, backend = Call("product", kernel, q=q, k=k, v=v), BACKENDS["borrowed"]
        >>> with torch.no_grad():
        ...     outputs = backend.results(call, keep=True)
        ...     outputs = backend.among_others(call, outputs, out=outputs[0], log_sum=outputs[1])
        ...     found = backend.gradients(call, outputs, [torch.ones_like(q), None], {"q", "k"})
        >>> found["q"].shape == q.shape, backend.serves_whole(call), len(backend.empty_saved(call)) == len(outputs) - 2
        (True, False, True)
    """

    @abstractmethod
    def forward(self, call: Call, *, keep: bool) -> list[Tensor]:
        """Return the results of a step, and what `backward` needs besides them and the call.

        Args:
            call: An absorb, read or causal call that this backend supports; a product if it `serves_whole` ones.
            keep: Whether there will be a backward; otherwise the results are enough.

        Returns:
            absorb: the three tensors of the sums. read: the result (B, H, L, E) in the type of q and its log-sums
            (B, H, L). causal: both, then the sums. After them, with `keep`, what `empty_kept` describes.
        """

    @abstractmethod
    def backward(
        self, call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
    ) -> dict[str, Tensor]:
        """Return the gradients of the tensors that are needed.

        Args:
            call: That of `forward`.
            outputs: What `forward` returned.
            d_results: Gradients of the results, in their order; None for zero. A log-scale counts as a constant.
            needed: Names of tensors of the call, such as "q", "omega" or "values".

        Returns:
            Gradients by name, in the shapes of the tensors; zero for those that are left out.
        """

    def empty_kept(self, call: Call) -> list[Tensor]:
        """Return uninitialised tensors like those that `forward` keeps. torch.compile sees them in its place.

        Args:
            call: An absorb, read or causal call.
        """
        return []

    def serves_whole(self, call: Call) -> bool:
        """Return whether `forward` serves a product as one step; if not, it is an absorb and a read.

        Args:
            call: A product.
        """
        return False

    def results(self, call: Call, *, keep: bool) -> list[Tensor]:
        """Return what `forward` gives for a step; for a product what it gives for an absorb and a read.

        Args:
            call: Of any step that this backend supports.
            keep: As in `forward`.

        Returns:
            The results; with `keep` also what `gradients` needs of them.
        """
        if call.step != "product" or self.serves_whole(call):
            found = self.forward(call, keep=keep)
            return found if keep else found[: NUM_RESULTS[call.step]]
        sums = self.forward(_absorbing(call), keep=keep)
        found = self.forward(_reading(call, sums), keep=keep)
        return [*found, *sums] if keep else found[:2]

    def gradients(
        self, call: Call, outputs: Sequence[Tensor], d_results: Sequence[Tensor | None], needed: Collection[str]
    ) -> dict[str, Tensor]:
        """Return what `backward` gives for a step; for a product that of a read and of an absorb, added up.

        Args:
            call: That of `results`.
            outputs: What `results` returned.
            d_results: As in `backward`.
            needed: As in `backward`.
        """
        if call.step != "product" or self.serves_whole(call):
            return self.backward(call, outputs, d_results, needed)
        absorbing, num_sums = _absorbing(call), 3 + len(self.empty_kept(_absorbing(call)))
        read, sums = outputs[: len(outputs) - num_sums], outputs[len(outputs) - num_sums :]
        found = self.backward(_reading(call, sums), read, d_results, {"values", "weights", *needed} - OF_KEYS)
        d_sums = [found.pop(name, None) for name in Sums._fields]
        for name, x in self.backward(absorbing, sums, [*d_sums[:2], None], set(needed) - {"q"}).items():
            found[name] = found[name].add_(x) if name in found else x
        return found

    def among_others(self, call: Call, outputs: Sequence[Tensor], out: Tensor, log_sum: Tensor) -> list[Tensor]:
        """Return outputs from which `gradients` gives those of attention to these keys and others.

        The gradient of a score takes of all other keys no more than the result and the log-sum of the whole.

        Args:
            call: A product or a causal call of a kernel that is not negative.
            outputs: What `results` returned.
            out: The result over the keys of both, (B, H, L, E).
            log_sum: Its log-sums, (B, H, L).
        """
        return [out, log_sum, *outputs[2:]]

    def empty_saved(self, call: Call) -> list[Tensor]:
        """Return uninitialised tensors like those that `results` keeps besides the results.

        Args:
            call: Of any step.
        """
        if call.step != "product" or self.serves_whole(call):
            return self.empty_kept(call)
        absorbing, sums = _absorbing(call), empty_sums(call)
        return [*self.empty_kept(_reading(call, sums)), *sums, *self.empty_kept(absorbing)]

    def product(self, call: Call) -> tuple[Tensor, Tensor]:
        out, log_sum, *_ = self.run(call)
        return out, log_sum

    def absorb(self, call: Call) -> Sums:
        return Sums(*self.run(call)[:3])

    def read(self, call: Call) -> tuple[Tensor, Tensor]:
        out, log_sum, *_ = self.run(call)
        return out, log_sum

    def causal(self, call: Call) -> tuple[Tensor, Tensor, Sums]:
        out, log_sum, *sums = self.run(call)
        return out, log_sum, Sums(*sums[:3])

    def run(self, call: Call) -> Sequence[Tensor]:
        """Call `results` as one node of autograd's graph, or as one op where a program is traced.

        Args:
            call: That this backend supports.

        Returns:
            The results, differentiable; then what was kept.
        """
        tensors = tuple(call.tensors().values())
        if torch.compiler.is_compiling():
            # An exported program holds no assumption on the length: who computes is decided when it runs.
            exporting = torch.compiler.is_exporting()
            keep = call.wants_gradients and not exporting
            return _op("auto" if exporting else self.name, keep, call.step, *call.constants, *tensors)
        if not call.wants_gradients:
            with full_precision(call.tokens):
                return self.results(call, keep=False)
        return cast(Sequence[Tensor], SpectralProduct.apply(self, call.step, call.constants, *tensors))  # type: ignore[no-untyped-call]


def _absorbing(call: Call) -> Call:
    return replace(call, step="absorb", q=None)


def _reading(call: Call, sums: Sequence[Tensor]) -> Call:
    return Call("read", call.kernel, q=call.q, sums=Sums(*sums[:3]), just_absorbed=True)


def has_sums(step: Step) -> bool:
    """Return whether sums are among the results of a step."""
    return NUM_RESULTS[step] > 2


def empty_results(call: Call) -> list[Tensor]:
    """Return uninitialised results of a step."""
    found = []
    if call.q is not None:
        found = [call.q.new_empty(*call.q.shape[:3], call.value_dim), _empty(call, call.q.shape[2])]
    return [*found, *empty_sums(call)] if has_sums(call.step) else found


def empty_sums(call: Call) -> Sums:
    """Return uninitialised sums; in memory they stand head by head, and as those who compute want them."""
    features, exponential = call.kernel.state_features(call.head_dim), call.feature_map.exponential
    values = _empty(call, features, call.value_dim) if exponential else _empty(call, call.value_dim, features).mT
    return Sums(values, weights=_empty(call, features), log_scale=_empty(call, call.num_scales))


def _empty(call: Call, *shape: int) -> Tensor:
    rows = (call.num_heads, call.batch_size)
    return torch.empty(*rows, *shape, dtype=call.dtype, device=call.device).transpose(0, 1)


def _gradients(
    backend: FusedBackend,
    call: Call,
    outputs: Sequence[Tensor],
    d_results: Sequence[Tensor | None],
    needed: Sequence[bool],
    derive: Callable[..., Sequence[Tensor]],
) -> list[Tensor | None]:
    """Return the gradient of every tensor of a call that is needed.

    Args:
        derive: Computes them, unless they are to be derived again: then plain operations do.
    """
    if all(d is None for d in d_results):
        return [None] * len(TENSORS)
    if any(d is not None and is_derived_again(d) for d in d_results):
        # The sums of plain operations must refer to the log-scale that the forward pass has given.
        log_scale = outputs[NUM_RESULTS[call.step] - 1] if has_sums(call.step) else None

        def results(tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
            return plain.results(Call.of(call.step, tuple(tensors), *call.constants), log_scale)

        return gradients_of(results, list(call.tensors().values()), needed, d_results)
    found = iter(derive())
    return [next(found) if is_needed else None for is_needed in needed]


def gradients_by_name(
    backend: FusedBackend,
    call: Call,
    outputs: Sequence[Tensor],
    d_results: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> dict[str, Tensor]:
    """Return the gradients that are needed, in the types of their tensors."""
    wanted = {name: cast(Tensor, x) for (name, x), n in zip(call.tensors().items(), needed, strict=True) if n}
    with full_precision(call.tokens):
        found = backend.gradients(call, outputs, d_results[: NUM_RESULTS[call.step]], wanted.keys())
    return {name: found[name].to(x.dtype) if name in found else torch.zeros_like(x) for name, x in wanted.items()}


class SpectralProduct(torch.autograd.Function):
    """A call in eager mode."""

    @staticmethod
    def forward(
        ctx: Any, backend: FusedBackend, step: Step, constants: tuple[Any, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        call = Call.of(step, tensors, *constants)
        with full_precision(call.tokens):
            outputs = tuple(backend.results(call, keep=True))
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.step, ctx.constants = backend, step, constants
        ctx.save_for_backward(*tensors, *outputs)
        num_results = NUM_RESULTS[step]
        ctx.mark_non_differentiable(*outputs[num_results - has_sums(step) :])
        return outputs

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tensors, outputs = saved[: len(TENSORS)], saved[len(TENSORS) :]
        call, needed = Call.of(ctx.step, tensors, *ctx.constants), ctx.needs_input_grad[3:]
        d_results = d_outputs[: NUM_RESULTS[ctx.step]]
        given = (ctx.backend, call, outputs, d_results, needed)
        return None, None, None, *_gradients(*given, derive=lambda: [*gradients_by_name(*given).values()])


@torch.library.custom_op("klformer::spectral_product", mutates_args=())
def _op(
    backend: str,
    keep: bool,
    step: str,
    feature_map: str,
    simplex: bool,
    norm_coefficient: float,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    values: Tensor | None,
    weights: Tensor | None,
    log_scale: Tensor | None,
    omega: Tensor | None,
    pair_offset: Tensor | None,
    frequency_bias: Tensor | None,
    smoothing: Tensor | None,
    key_bias: Tensor | None,
    key_mask: Tensor | None,
) -> list[Tensor]:
    tensors = (q, k, v, values, weights, log_scale, omega, pair_offset, frequency_bias, smoothing, key_bias, key_mask)
    chosen, call = _opened(backend, step, feature_map, simplex, norm_coefficient, *tensors)
    with full_precision(call.tokens):
        return [x.contiguous() for x in chosen.results(call, keep=keep)]


def _opened(backend: str, step: str, *rest: Any) -> tuple[FusedBackend, Call]:
    """Return the backend and the call of an op's arguments."""
    feature_map, simplex, norm_coefficient, *tensors = rest
    call = Call.of(cast(Step, step), tuple(tensors), feature_map, simplex, norm_coefficient)
    chosen = choose_backend(call) if backend == "auto" else BACKENDS[backend]
    # Who is chosen for an exported program may have no op; `chunked` serves every call.
    return chosen if isinstance(chosen, FusedBackend) else cast(FusedBackend, BACKENDS["chunked"]), call


@_op.register_fake
def _(backend, keep, step, *rest):  # type: ignore[no-untyped-def]
    chosen, call = _opened("chunked" if backend == "auto" else backend, step, *rest)
    return [x.contiguous() for x in empty_results(call) + (chosen.empty_saved(call) if keep else [])]


@torch.library.custom_op("klformer::spectral_product_backward", mutates_args=())
def _backward_op(
    d_results: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    needed: Sequence[bool],
    backend: str,
    step: str,
    feature_map: str,
    simplex: bool,
    norm_coefficient: float,
    tensors: Sequence[Tensor | None],
) -> list[Tensor]:
    chosen, call = _opened(backend, step, feature_map, simplex, norm_coefficient, *tensors)
    return [x.contiguous() for x in gradients_by_name(chosen, call, outputs, d_results, needed).values()]


@_backward_op.register_fake
def _(d_results, outputs, needed, backend, step, feature_map, simplex, norm_coefficient, tensors):  # type: ignore[no-untyped-def]
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x, n in zip(tensors, needed, strict=True) if n
    ]


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.backend, ctx.keep, ctx.step, *ctx.constants = inputs[:6]
    ctx.num_tensors = len(inputs) - 6
    ctx.save_for_backward(*inputs[6:], *output)


def _op_backward(ctx, d_outputs):  # type: ignore[no-untyped-def]
    if not ctx.keep:
        raise ArgumentError(
            "an exported product has no gradients: it was traced for inference; train the model that it was made of"
        )
    saved = list(ctx.saved_tensors)
    tensors, outputs = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
    needed, num_results = list(ctx.needs_input_grad[6:]), NUM_RESULTS[ctx.step]
    # A log-scale counts as a constant.
    d_results = list(d_outputs[:num_results])
    if has_sums(ctx.step):
        d_results[-1] = None
    backend, call = _opened(ctx.backend, ctx.step, *ctx.constants, *tensors)

    def derive() -> list[Tensor]:
        return _backward_op(d_results, outputs, needed, ctx.backend, ctx.step, *ctx.constants, tensors)

    return (None,) * 6 + tuple(_gradients(backend, call, outputs, d_results, needed, derive))


_op.register_autograd(_op_backward, setup_context=_setup_context)
