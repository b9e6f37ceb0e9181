"""The linear-time attention product: phi(q) (phi(k)^T v), normalised, for any feature map and any frequencies.

    out_i = sum_j kappa(q_i, k_j) v_j / sum_j kappa(q_i, k_j)      (Eq. 1 of the paper)
    kappa(q, k) = phi(q).phi(k) + smoothing

`spectral_product` is the door to `bidirectional` and `causal`: it checks the operands and goes through a pair of
torch custom ops, so that autograd and torch.compile see the product whole. Memory is O(L (D + E)) whatever the number
of features is.
"""

import math

import torch
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops import bidirectional, causal
from klformer.ops.feature_maps import make_feature_map
from klformer.ops.steps import Residuals, empty_residuals
from klformer.ops.tiling import CPU_CHUNK_BYTES, GPU_CHUNK_BYTES, MAX_CHUNK, MIN_CHUNK, Problem


def spectral_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    *,
    feature_map: str,
    mean: Tensor | None = None,
    key_mask: Tensor | None = None,
    norm_coefficient: float = 1.0,
    smoothing: float = 0.0,
    causal: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """Attention with the kernel of `feature_map` at the frequencies `omega`, in time and memory linear in the length.

    Args:
        q: Queries (B, H, L, D).
        k: Keys (B, H, S, D).
        v: Values (B, H, S, E).
        omega: Frequencies (H or 1, R, D); None for "elu", which has none.
        feature_map: "rks", "prf" or "elu".
        mean: (H or 1, D), "rks" only. The frequencies are then omega + mean and omega - mean, 2 R of them, at the
            cost of R.
        key_mask: (B, S), True = keep. A key that is not kept contributes to nothing; a query without any key gives 0.
        norm_coefficient: c in exp(omega.x - c |x|^2), "prf" only: 1 in the paper, 1/2 for the softmax kernel.
        smoothing: Added to the kernel, whose value at distance 0 is 1; "rks" only. Keeps denominators positive.
        causal: Query i sees keys 0 .. i only; needs L = S.
        chunk: Tokens worked on at a time; chosen by size and device if None. Changes speed, and results only by
            rounding.

    Returns:
        (B, H, L, E), in the type of `v`. Computed in float32 at least, also under autocast.

    Raises:
        ValueError: if a shape or a combination of arguments is impossible.
    """
    _check(q, k, v, omega, mean, key_mask, feature_map, smoothing, causal, chunk)
    num_features = make_feature_map(feature_map).copies * (q.shape[-1] if omega is None else omega.shape[-2])
    # The features leave out the factor 1/R, so that the constant takes R: a common factor cancels in the quotient.
    scale = 1 if omega is None else omega.shape[-2]
    if chunk is None:
        chunk = default_chunk(q.shape[0] * q.shape[1], max(q.shape[2], k.shape[2]), num_features, q.device, causal)
    results = _forward_op(
        q, k, v, omega, mean, key_mask, feature_map, float(norm_coefficient), float(smoothing * scale), causal, chunk
    )
    return results[0]


def default_chunk(rows: int, length: int, num_features: int, device: torch.device, causal: bool) -> int:
    """Tokens a chunk, so that the features of one chunk fit the budget of the device."""
    if causal:
        # The (chunk, chunk) scores cost as much as the state where a chunk is as long as a value is wide.
        return 64 if device.type == "cpu" and num_features >= 256 else 128
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    tokens = budget // (4 * num_features * max(1, min(rows, 8)))
    return min(max(MIN_CHUNK, tokens), MAX_CHUNK, max(1, length))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    mean: Tensor | None,
    key_mask: Tensor | None,
    feature_map: str,
    smoothing: float,
    causal: bool,
    chunk: int | None,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ArgumentError(
                f"{name} must have 4 dimensions (batch, heads, length, size), got shape {tuple(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise ArgumentError(f"{name} must be of a floating-point type, got {tensor.dtype}")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ArgumentError(
            "q (B,H,L,D), k (B,H,S,D) and v (B,H,S,E) must agree in B, H, S and D, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ArgumentError(f"causal needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}")
    if key_mask is not None and (key_mask.shape != (k.shape[0], k.shape[2]) or key_mask.dtype != torch.bool):
        raise ArgumentError(
            f"key_mask must be a bool tensor of shape {(k.shape[0], k.shape[2])} (True = keep), "
            f"got {key_mask.dtype} of shape {tuple(key_mask.shape)}"
        )
    if (omega is None) != (feature_map == "elu"):
        raise ArgumentError(
            f"feature_map {feature_map!r} {'takes no' if feature_map == 'elu' else 'needs'} frequencies (omega)"
        )
    if omega is not None and (
        omega.dim() != 3 or omega.shape[0] not in (1, q.shape[1]) or omega.shape[1] == 0 or omega.shape[2] != q.shape[3]
    ):
        raise ArgumentError(f"omega must be ({q.shape[1]} or 1, R, {q.shape[3]}) with R >= 1, got {tuple(omega.shape)}")
    if mean is not None and (
        feature_map != "rks" or mean.dim() != 2 or mean.shape[0] not in (1, q.shape[1]) or mean.shape[1] != q.shape[3]
    ):
        raise ArgumentError(
            f"mean must be ({q.shape[1]} or 1, {q.shape[3]}) and goes with 'rks' only, got {tuple(mean.shape)}"
        )
    if not 0 <= smoothing < math.inf or (smoothing > 0 and feature_map != "rks"):
        raise ArgumentError(f"smoothing must be >= 0, and 0 for {feature_map!r}, got {smoothing}")
    if chunk is not None and chunk < 1:
        raise ArgumentError(f"chunk must be at least 1, got {chunk}")


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    mean: Tensor | None,
    key_mask: Tensor | None,
    feature_map: str,
    norm_coefficient: float,
    smoothing: float,
) -> Problem:
    return Problem(q, k, v, omega, mean, key_mask, make_feature_map(feature_map, norm_coefficient), smoothing)


def _as_tuple(saved: Residuals) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        saved.out,
        saved.denominator,
        saved.state,
        saved.key_shift,
        saved.query_shift,
        saved.slope,
        saved.starts,
    )


@torch.library.custom_op("klformer::spectral_product", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    mean: Tensor | None,
    key_mask: Tensor | None,
    feature_map: str,
    norm_coefficient: float,
    smoothing: float,
    causal_mask: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = _problem(q, k, v, omega, mean, key_mask, feature_map, norm_coefficient, smoothing)
    with torch.autocast(q.device.type, enabled=False):
        saved = causal.forward(problem, chunk) if causal_mask else bidirectional.forward(problem, chunk)
    return _as_tuple(saved)


@_forward_op.register_fake
def _(q, k, v, omega, mean, key_mask, feature_map, norm, smoothing, causal_mask, chunk):  # type: ignore[no-untyped-def]
    problem = _problem(q, k, v, omega, mean, key_mask, feature_map, norm, smoothing)
    num_states = causal.num_checkpoints(q.shape[2], chunk) if causal_mask else 1
    saved = empty_residuals(problem, num_states=num_states)
    if causal_mask and problem.feature_map.exponential:
        saved.starts = saved.denominator.new_empty(saved.denominator.shape[:2], dtype=torch.bool)
    return _as_tuple(saved)


@torch.library.custom_op("klformer::spectral_product_backward", mutates_args=())
def _backward_op(
    d_out: Tensor,
    saved: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    mean: Tensor | None,
    key_mask: Tensor | None,
    feature_map: str,
    norm_coefficient: float,
    smoothing: float,
    causal_mask: bool,
    chunk: int,
    need_omega: bool,
) -> list[Tensor]:
    problem = _problem(q, k, v, omega, mean, key_mask, feature_map, norm_coefficient, smoothing)
    direction = causal if causal_mask else bidirectional
    with torch.autocast(q.device.type, enabled=False):
        grads = direction.backward(problem, d_out, Residuals(*saved), chunk, need_omega)
    parameters = [(omega, grads.omega), (mean, grads.mean)]
    return [grads.q, grads.k, grads.v] + [g.to(p.dtype) for p, g in parameters if p is not None and g is not None]


@_backward_op.register_fake
def _(d_out, saved, q, k, v, omega, mean, key_mask, *options):  # type: ignore[no-untyped-def]
    need_omega = options[-1]
    wanted = [q, k, v] + ([omega] if omega is not None and need_omega else []) + ([] if mean is None else [mean])
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in wanted]


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    *operands, ctx.feature_map, ctx.norm_coefficient, ctx.smoothing, ctx.causal_mask, ctx.chunk = inputs
    ctx.save_for_backward(*operands, *output)


def _autograd(ctx, d_out, *unused):  # type: ignore[no-untyped-def]
    if d_out is None:
        return (None,) * 11
    tensors = ctx.saved_tensors
    operands, saved = tensors[:6], list(tensors[6:])
    need_omega = ctx.needs_input_grad[3]
    grads = _backward_op(
        d_out,
        saved,
        *operands,
        ctx.feature_map,
        ctx.norm_coefficient,
        ctx.smoothing,
        ctx.causal_mask,
        ctx.chunk,
        need_omega,
    )
    d_q, d_k, d_v, *rest = grads
    d_omega = rest.pop(0) if operands[3] is not None and need_omega else None
    d_mean = rest.pop(0) if operands[4] is not None else None
    return d_q, d_k, d_v, d_omega, d_mean, None, None, None, None, None, None


_forward_op.register_autograd(_autograd, setup_context=_setup_context)
