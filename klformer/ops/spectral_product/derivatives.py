"""The product in plain PyTorch, linear in the length: every derivative that torch can take of its own operations.

Fused backends have a backward of their own and nothing else. Forward-mode derivatives, torch.func's transforms (vmap,
jvp, jacrev, ...) and derivatives of gradients go through here instead; results are the same, features are kept for the
whole sequence. `ops/transforms.py` says when.

An exponential map is two softmax attentions, exact and without a maximum of its own:

    lse_r = log sum_j exp(omega_r.k_j + b_j)        A_r = sum_j softmax_j(omega_r.k_j + b_j) v_j
    out_i = sum_r softmax_r(omega_r.q_i + a_r + lse_r) A_r

If causal, a chunk of queries sees what was before it as those R entries (A_r, lse_r), and its own keys one by one.
"""

import torch
from torch import Tensor

from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.operands import FLOOR, SpectralOperands, paired_frequencies

#: Queries that see each other one by one, where it is causal.
CHUNK = 32
#: The log-weight of what is not there: below all others, but a number, of which derivatives are numbers too. What is
#: not seen is twice as far away, so that a query that sees nothing has the zeros of keys that are not there.
NOTHING = -1e30


def attend_plainly(operands: SpectralOperands) -> Tensor:
    """The product (B, H, L, E), in the type of the values."""
    operands = operands.weighted()
    with full_precision(operands.q):
        attend = _attend_exponential if operands.feature_map.exponential else _attend_features
        return attend(operands).to(operands.v.dtype)


def _attend_exponential(operands: SpectralOperands) -> Tensor:
    k, v, bias = _keys(operands)
    omega, frequency_bias = _frequencies(operands)
    assert omega is not None, "exponential maps have frequencies"
    scores_q = operands.q.to(k.dtype) @ omega.transpose(-1, -2)
    if frequency_bias is not None:
        scores_q = scores_q + frequency_bias.unsqueeze(-2)
    own = k @ omega.transpose(-1, -2)
    if operands.kernel.simplex:
        bias = bias - own.logsumexp(-1)
    scores_k = own + bias.unsqueeze(-1)  # (B, H, S, R)
    if not operands.causal:
        means, logs = _summary(scores_k, v)
        return (scores_q + logs.unsqueeze(-2)).softmax(-1) @ means
    shape = scores_q.shape[:2]
    logs = scores_k.new_full((*shape, omega.shape[-2]), NOTHING)
    means = v.new_zeros(*shape, omega.shape[-2], v.shape[-1])
    parts = []
    for start in range(0, k.shape[-2], CHUNK):
        here = slice(start, start + CHUNK)
        to_own = (scores_q[..., here, None, :] + own[..., None, here, :]).logsumexp(-1) + bias[..., None, here]
        to_own = to_own.masked_fill(~_lower(to_own), 2 * NOTHING)
        to_past = scores_q[..., here, :] + logs.unsqueeze(-2)
        weights = torch.cat([to_past, to_own], -1).softmax(-1)
        parts.append(weights @ torch.cat([means, v[..., here, :].expand(*shape, -1, -1)], -2))
        new_means, new_logs = _summary(scores_k[..., here, :], v[..., here, :])
        together = torch.logaddexp(logs, new_logs)
        means = (logs - together).exp().unsqueeze(-1) * means + (new_logs - together).exp().unsqueeze(-1) * new_means
        logs = together
    return torch.cat(parts, -2) if parts else operands.q.new_zeros(*operands.q.shape[:-1], v.shape[-1])


def _summary(scores_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A_r (B, H, R, E) and lse_r (B, H, R) of some keys; zeros of no weight, if there are none."""
    if not scores_k.shape[-2]:
        rows = (*scores_k.shape[:-2], scores_k.shape[-1])
        return v.new_zeros(*rows, v.shape[-1]), scores_k.new_full(rows, NOTHING)
    return scores_k.softmax(-2).transpose(-1, -2) @ v, scores_k.logsumexp(-2)


def _attend_features(operands: SpectralOperands) -> Tensor:
    k, v, bias = _keys(operands)
    omega, frequency_bias = _frequencies(operands)
    fmap = operands.feature_map
    scores = [x if omega is None else x @ omega.transpose(-1, -2) for x in (operands.q.to(k.dtype), k)]
    num_features = 1 if omega is None else omega.shape[-2]
    phi_q = fmap.explicit(scores[0], None if frequency_bias is None else frequency_bias.unsqueeze(-2)) / num_features
    phi_k = fmap.explicit(scores[1])
    smoothing = None
    if operands.kernel.smoothing is not None:
        # A constant is one more feature.
        smoothing = operands.kernel.smoothing.to(k.dtype)[:, None, None]
        phi_q = torch.cat([phi_q, smoothing + torch.zeros_like(phi_q[..., :1])], -1)
        phi_k = torch.cat([phi_k, torch.ones_like(phi_k[..., :1])], -1)
    columns = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if not k.shape[-2]:
        return torch.zeros_like(operands.q[..., :1], dtype=v.dtype).expand(*operands.q.shape[:-1], v.shape[-1])
    if not operands.causal:
        weighted = (bias - bias.detach().amax(-1, keepdim=True)).exp().unsqueeze(-1) * columns
        return _quotient(phi_q @ (phi_k.transpose(-1, -2) @ weighted), weighted.sum(-2, keepdim=True), smoothing)
    largest = bias.detach().cummax(-1).values  # of all keys that a query sees
    parts, state, total, reference = [], None, None, largest[..., :1]
    for start in range(0, k.shape[-2], CHUNK):
        here = slice(start, start + CHUNK)
        seen = (bias[..., None, here] - largest[..., here, None]).clamp(max=0).exp()
        seen = seen.masked_fill(~_lower(seen), 0)
        sums = phi_q[..., here, :] @ phi_k[..., here, :].transpose(-1, -2) * seen @ columns[..., here, :]
        totals = seen @ columns[..., here, :]
        if state is not None and total is not None:
            factor = (reference - largest[..., here]).exp().unsqueeze(-1)
            sums, totals = sums + factor * (phi_q[..., here, :] @ state), totals + factor * total
        parts.append(_quotient(sums, totals, smoothing))
        last = largest[..., here][..., -1:]
        weighted = (bias[..., here] - last).exp().unsqueeze(-1) * columns[..., here, :]
        added, added_total = phi_k[..., here, :].transpose(-1, -2) @ weighted, weighted.sum(-2, keepdim=True)
        fade = (reference - last).exp().unsqueeze(-1)
        state = added if state is None else fade * state + added
        total = added_total if total is None else fade * total + added_total
        reference = last
    return torch.cat(parts, -2)


def _quotient(sums: Tensor, totals: Tensor, smoothing: Tensor | None) -> Tensor:
    """Values over weights. The values of keys that are not there are 0, so that a query without keys gives 0.

    Args:
        sums: (B, H, L, E + 1).
        totals: Sums of the weighted values and of the weights that a query sees, (B, H, L or 1, E + 1).
        smoothing: (H or 1, 1, 1); its half is the least mean of a query's kernel (`operands.py`).
    """
    if smoothing is not None:
        weight = totals[..., -1:]
        mean = sums[..., -1:] / weight.masked_fill(weight == 0, 1)
        sums = sums + (FLOOR * smoothing - mean).clamp(min=0) * totals
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total == 0, 1)


def _keys(operands: SpectralOperands) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and log-weights (B or 1, H or 1, S); what is not there is not looked at."""
    dtype = operands.dtype
    k, v = operands.k.to(dtype), operands.v.to(dtype)
    bias = torch.zeros_like(k[:1, :1, :, 0]) if operands.key_bias is None else operands.key_bias.to(dtype)
    if operands.key_mask is not None:
        absent = ~operands.key_mask
        k, v = (x.masked_fill(absent.unsqueeze(-1), 0) for x in (k, v))
        bias = bias.masked_fill(absent, NOTHING)
    return k, v, bias


def _frequencies(operands: SpectralOperands) -> tuple[Tensor | None, Tensor | None]:
    """Frequencies and their log-weights, pairs written out."""
    kernel, dtype = operands.kernel, operands.dtype
    omega = None if kernel.omega is None else kernel.omega.to(dtype)
    bias = None if kernel.frequency_bias is None else kernel.frequency_bias.to(dtype)
    if omega is not None and kernel.pair_offset is not None:
        omega = paired_frequencies(omega, kernel.pair_offset.to(dtype))
        bias = None if bias is None else torch.cat([bias, bias], -1)
    return omega, bias


def _lower(pairs: Tensor) -> Tensor:
    """Which keys of a chunk its queries see."""
    return torch.ones(pairs.shape[-2:], dtype=torch.bool, device=pairs.device).tril()
