"""The three steps in plain PyTorch, linear in the length: every derivative that torch can take of its own operations.

Fused backends have a backward of their own and nothing else. Forward-mode derivatives, torch.func's transforms (vmap,
jvp, jacrev, ...) and derivatives of gradients go through here instead; results are the same, features are kept for the
whole sequence. `ops/transforms.py` says when. Programs for ONNX hold these operations, too: there is no loop over the
length in them.

An exponential map is two softmax attentions, exact and without a maximum of its own:

    lse_r = log sum_j exp(omega_r.k_j + b_j)        A_r = sum_j softmax_j(omega_r.k_j + b_j) v_j       absorb
    out_i = sum_r softmax_r(omega_r.q_i + a_r + lse_r) A_r                                             read

If causal, a chunk of queries sees what was before it as those R entries (A_r, lse_r), and its own keys one by one. All
chunks are worked on at once; what was before each is added up by doubling (`_Chunks.before`).
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.dispatch import Backend
from klformer.ops.spectral_product.operands import FLOOR, NO_KEY, Call, Sums

#: Queries that see each other one by one, where it is causal.
CHUNK = 32
#: How often chunks are added up in a program whose length is not known: enough for 2**25 tokens.
DOUBLINGS = 20
#: The log-weight of a key that is not there is `NO_KEY`: below all others, but a number, of which derivatives are
#: numbers too. What is not seen is twice as far away, so that a query that sees nothing has the zeros of such keys.
UNSEEN = 2 * NO_KEY


class PlainBackend(Backend):
    """Serves every call; slower than the others, and for those that need it."""

    priority = -10

    def supports(self, call: Call) -> str | None:
        return None

    def absorb(self, call: Call) -> Sums:
        with full_precision(call.tokens):
            return absorb(call)

    def read(self, call: Call) -> tuple[Tensor, Tensor]:
        with full_precision(call.tokens):
            return read(call)

    def causal(self, call: Call) -> tuple[Tensor, Tensor, Sums]:
        with full_precision(call.tokens):
            return causal(call)


def results(call: Call, log_scale: Tensor | None) -> list[Tensor]:
    """Return the results of a step in the order of fused backends, sums relative to a log-scale that is given."""
    with full_precision(call.tokens):
        if call.step == "absorb":
            return list(absorb(call, log_scale))
        if call.step == "read":
            return list(read(call))
        if call.step == "product":
            return list(read(replace(call, step="read", sums=absorb(call))))
        out, log_sum, sums = causal(call, log_scale)
        return [out, log_sum, *sums]


def absorb(call: Call, log_scale: Tensor | None = None) -> Sums:
    """Return the sums of the keys and values, relative to `log_scale` (B, H, F or 1), or one that is found."""
    k, v, bias = _keys(call)
    phi, logs = _key_features(call, k, bias)
    reference = logs.detach()
    if log_scale is None:
        shape = (*k.shape[:2], reference.shape[-1])
        if not k.shape[2]:
            log_scale = reference.new_full(shape, NO_KEY)
        elif call.feature_map.exponential:
            log_scale = reference.logsumexp(-2).expand(shape)
        else:
            log_scale = reference.amax(-2).expand(shape)
    factors = (logs - log_scale.unsqueeze(-2)).exp()
    weighted = (factors if phi is None else phi * factors).expand(*k.shape[:3], -1)  # (B, H, S, F)
    return Sums(weighted.transpose(-1, -2) @ v, weighted.sum(-2), log_scale)


def read(call: Call) -> tuple[Tensor, Tensor]:
    """Return the result of queries against sums, in the type of q, and its log-sums."""
    assert call.q is not None
    assert call.sums is not None
    q, (values, weights, log_scale) = call.q.to(call.dtype), (x.to(call.dtype) for x in call.sums)
    if call.feature_map.exponential:
        no_key = weights == 0
        mass = weights.masked_fill(no_key, 1)
        logits = _query_scores(call, q) + (log_scale + mass.log()).unsqueeze(-2)
        out = logits.softmax(-1) @ (values / mass.unsqueeze(-1))
        return out.to(call.q.dtype), _log_sum(logits.logsumexp(-1), call)
    phi = _query_features(call, q)
    return _quotient(call, phi @ values, phi @ weights.unsqueeze(-1), values, weights, log_scale)


def causal(call: Call, log_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Sums]:
    """Return the result of queries against the keys up to them, its log-sums, and the sums of all keys."""
    assert call.q is not None
    own = absorb(call)
    before = call.sums or Sums(torch.zeros_like(own[0]), torch.zeros_like(own[1]), torch.full_like(own[2], NO_KEY))
    reference = torch.maximum(own.log_scale, before.log_scale).detach() if log_scale is None else log_scale
    after = [_relative(sums, reference) for sums in (own, before)]
    sums = Sums(after[0].values + after[1].values, after[0].weights + after[1].weights, reference)
    if not call.q.shape[2]:
        shape = call.q.shape[:3]
        return call.q.new_zeros(*shape, call.value_dim), call.q.new_zeros(shape, dtype=call.dtype), sums
    step = _causal_exponential if call.feature_map.exponential else _causal_features
    out, log_sum = step(call, before)
    return out, log_sum, sums


def _relative(sums: Sums, log_scale: Tensor) -> Sums:
    factor = (sums.log_scale - log_scale).exp()
    return Sums(sums.values * factor.unsqueeze(-1), sums.weights * factor, log_scale)


def _causal_exponential(call: Call, before: Sums) -> tuple[Tensor, Tensor]:
    assert call.q is not None
    assert call.kernel.omega is not None
    k, v, bias = _keys(call)
    chunks = _Chunks(k)
    own = k @ call.kernel.omega.to(k.dtype).transpose(-1, -2)
    if call.kernel.simplex:
        bias = bias - own.logsumexp(-1, keepdim=True) + call.kernel.log_normaliser
    scores_q, scores_k = _query_scores(call, call.q.to(k.dtype)), own + bias
    scores_q, own, scores_k, v, bias = (
        chunks.split(x) for x in (scores_q, own, scores_k, v, bias.expand(*k.shape[:3], 1))
    )
    largest = scores_k.detach().amax(-2)  # (B, H, chunks, R)
    weighted = (scores_k - largest.unsqueeze(-2)).exp().transpose(-1, -2)
    past, reference = chunks.before(weighted @ _with_ones(v), largest, before)
    count = past[..., -1:].masked_fill(past[..., -1:] == 0, 1)
    to_past = scores_q + (reference + count.squeeze(-1).log()).unsqueeze(-2)
    # One key of every chunk after the other: all pairs at once would take the memory of a chunk of features a token.
    to_own = torch.stack(
        [
            pad((scores_q[..., j:, :] + own[..., j, None, :]).logsumexp(-1) + bias[..., j, :], (j, 0), value=UNSEEN)
            for j in range(chunks.size)
        ],
        -1,
    )
    logits = torch.cat([to_past, to_own], -1)
    out = chunks.join(logits.softmax(-1) @ torch.cat([past[..., :-1] / count, v], -2))
    log_sum = chunks.join(logits.logsumexp(-1, keepdim=True)).squeeze(-1)
    return out.to(call.q.dtype), _log_sum(log_sum, call)


def _causal_features(call: Call, before: Sums) -> tuple[Tensor, Tensor]:
    assert call.q is not None
    k, v, bias = _keys(call)
    chunks = _Chunks(k)
    phi_k, _ = _key_features(call, k, bias)
    assert phi_k is not None
    phi_q, columns = _query_features(call, call.q.to(k.dtype)), _with_ones(v)
    phi_q, phi_k, columns, bias = (chunks.split(x) for x in (phi_q, phi_k, columns, bias.expand(*k.shape[:3], 1)))
    fixed = bias.detach().squeeze(-1)  # (B, H, chunks, c)
    heaviest = fixed.amax(-1, keepdim=True)
    past, reference = chunks.before(
        phi_k.transpose(-1, -2) @ ((bias - heaviest.unsqueeze(-1)).exp() * columns), heaviest, before
    )
    # Relative to the heaviest key that a query sees: what it does not see may be heavier by far.
    seen = _lower(chunks.size, k)
    so_far = fixed.unsqueeze(-2).masked_fill(~seen, UNSEEN).amax(-1)  # ONNX has no cummax
    scale = torch.maximum(so_far, reference).unsqueeze(-1)  # (B, H, chunks, c, 1)
    of_past = (reference.unsqueeze(-1) - scale).exp()
    of_own = (bias.transpose(-1, -2) - scale).masked_fill(~seen, UNSEEN).exp()
    products = of_past * (phi_q @ past) + (phi_q @ phi_k.transpose(-1, -2) * of_own) @ columns
    totals = None
    if call.kernel.smoothing is not None:
        totals = of_past * past[..., -1:, :] + of_own @ columns  # the constant feature is the last
    products, scale = chunks.join(products), chunks.join(scale)
    joined = None if totals is None else chunks.join(totals)
    values, weights = (None, None) if joined is None else (joined[..., :-1], joined[..., -1])
    return _held(call, products[..., :-1], products[..., -1:], values, weights, scale.squeeze(-1))


def _quotient(
    call: Call, numerator: Tensor, denominator: Tensor, values: Tensor, weights: Tensor, log_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Divide values by weights, with the floor of the smoothing; of sums (B, H, F, E), (B, H, F)."""
    if call.kernel.smoothing is None:
        return _held(call, numerator, denominator, None, None, log_scale)
    return _held(call, numerator, denominator, values[..., -1:, :], weights[..., -1:], log_scale)


def _held(
    call: Call,
    numerator: Tensor,
    denominator: Tensor,
    total: Tensor | None,
    weight: Tensor | None,
    log_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Divide the numerator by the denominator, held by the smoothing (`operands.py`).

    Args:
        numerator: (B, H, L, E), times R.
        denominator: (B, H, L, 1), times R.
        total: Weighted values of the keys that a query sees, (B, H, L or 1, E).
        weight: Their weights, (B, H, L or 1).
        log_scale: What both are relative to, (B, H, L or 1).
    """
    assert call.q is not None
    if call.kernel.smoothing is not None and total is not None and weight is not None:
        least = FLOOR * call.kernel.smoothing.to(numerator.dtype)[:, None, None]
        count = weight.unsqueeze(-1)
        missing = (least - denominator / count.masked_fill(count == 0, 1)).clamp(min=0)
        numerator, denominator = numerator + missing * total, denominator + missing * count
    no_key = denominator == 0
    out = numerator / denominator.masked_fill(no_key, 1)
    log_sum = denominator.masked_fill(no_key, 1).log().squeeze(-1) + log_scale
    log_sum = log_sum.masked_fill(no_key.squeeze(-1) | (log_sum < NO_KEY / 2), -torch.inf)
    return out.to(call.q.dtype), log_sum


def _log_sum(log_sum: Tensor, call: Call) -> Tensor:
    """Less the logarithm of R, and -inf for a query without any key."""
    return (log_sum - call.kernel.log_normaliser).masked_fill(log_sum < NO_KEY / 2, -torch.inf)


def _keys(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and log-weights (B or 1, H or 1, S, 1); what is not there is not looked at."""
    assert call.k is not None
    assert call.v is not None
    k, v = call.k.to(call.dtype), call.v.to(call.dtype)
    bias = torch.zeros_like(k[:1, :1, :, :1]) if call.key_bias is None else call.key_bias.to(call.dtype).unsqueeze(-1)
    if call.key_mask is not None:
        absent = ~call.key_mask.unsqueeze(-1)
        k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
    if call.kernel.norm_coefficient:
        bias = bias - call.kernel.norm_coefficient * k.square().sum(-1, keepdim=True)
    return k, v, bias if call.key_mask is None else bias.masked_fill(absent, NO_KEY)


def _key_features(call: Call, k: Tensor, bias: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return features (B, H, S, F) and their logarithmic factor (B or 1, H or 1, S, 1); of an exponential map None and
    the logarithms of its features, (B, H, S, R)."""
    kernel = call.kernel
    scores = k if kernel.omega is None else k @ kernel.omega.to(k.dtype).transpose(-1, -2)
    if not call.feature_map.exponential:
        return _with_more_features(call, call.feature_map.explicit(scores), k, 1.0), bias
    if kernel.simplex:
        bias = bias - scores.logsumexp(-1, keepdim=True) + kernel.log_normaliser
    return None, scores + bias


def _query_scores(call: Call, q: Tensor) -> Tensor:
    """Return the scores of an exponential map (B, H, L, R), with the log-weights of the frequencies."""
    assert call.kernel.omega is not None
    scores = q @ call.kernel.omega.to(q.dtype).transpose(-1, -2)
    bias = call.kernel.frequency_bias
    return scores if bias is None else scores + bias.to(q.dtype).unsqueeze(-2)


def _query_features(call: Call, q: Tensor) -> Tensor:
    """Return features (B, H, L, F) over R, times the frequencies' weights and the smoothing."""
    kernel = call.kernel
    if kernel.omega is None:
        return call.feature_map.explicit(q)
    scores = q @ kernel.omega.to(q.dtype).transpose(-1, -2)
    bias = kernel.frequency_bias
    phi = call.feature_map.explicit(scores, None if bias is None else bias.to(q.dtype).unsqueeze(-2))
    smoothing = 1.0 if kernel.smoothing is None else kernel.smoothing.to(q.dtype)[:, None, None]
    return _with_more_features(call, phi / kernel.omega.shape[-2], q, smoothing)


def _with_more_features(call: Call, phi: Tensor, x: Tensor, constant: float | Tensor) -> Tensor:
    """Return phi with the factors of a pair offset and the constant feature of the smoothing, as `Sums` has them."""
    if call.kernel.pair_offset is not None:
        angle = x @ call.kernel.pair_offset.to(x.dtype).unsqueeze(-1)  # (B, H, S, 1)
        phi = torch.cat([phi * angle.cos(), phi * angle.sin()], -1)
    if call.kernel.smoothing is not None:
        phi = torch.cat([phi, constant + torch.zeros_like(phi[..., :1])], -1)
    return phi


class _Chunks:
    """A sequence in chunks of equal length; what is beyond its end repeats its last token, which nobody sees."""

    def __init__(self, k: Tensor) -> None:
        self._length, self._device = k.shape[2], k.device
        # In a program that is exported the length is a symbol: it takes the steps that a long sequence takes, and at
        # least two chunks, so that no size is known for an axis of one.
        known = not torch.compiler.is_exporting()
        self.size = min(CHUNK, self._length) if known else CHUNK
        self._number = (self._length + self.size - 1) // self.size + (not known)
        self._doublings = (self._number - 1).bit_length() if known else DOUBLINGS

    def split(self, x: Tensor) -> Tensor:
        starts = self.size * torch.arange(self._number, device=self._device)
        places = starts[:, None] + torch.arange(self.size, device=self._device)
        return x[:, :, places.clamp(max=self._length - 1)]

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(2, 3).index_select(2, torch.arange(self._length, device=self._device))

    def before(self, sums: Tensor, reference: Tensor, first: Sums) -> tuple[Tensor, Tensor]:
        """Return what came before each chunk: after n rounds a chunk has the sums of 2^n chunks, itself the last.

        Args:
            sums: Of each chunk, (B, H, chunks, F, E + 1).
            reference: The logarithms that they are relative to, (B or 1, H or 1, chunks, F or 1), constants.
            first: What came before the first chunk.
        """
        for round_number in range(self._doublings):
            sums, reference = _merged(sums, reference, *self._shifted(sums, reference, 2**round_number))
        past = self._shifted(sums, reference, 1)
        start = torch.cat([first.values, first.weights.unsqueeze(-1)], -1).unsqueeze(2)
        return _merged(*past, start, first.log_scale.unsqueeze(2))

    def _shifted(self, sums: Tensor, reference: Tensor, distance: int) -> tuple[Tensor, Tensor]:
        """Return those of the chunk that many chunks before; nothing where there is none."""
        places = torch.arange(self._number, device=self._device) - distance
        sums, reference = (x.index_select(2, places.clamp(min=0)) for x in (sums, reference))
        none = (places < 0)[:, None]
        return sums.masked_fill(none.unsqueeze(-1), 0), reference.masked_fill(none, NO_KEY)


def _merged(sums: Tensor, reference: Tensor, others: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of two sums, relative to the larger of their logarithms."""
    common = torch.maximum(reference, theirs).detach()
    factors = ((x - common).exp().unsqueeze(-1) for x in (reference, theirs))
    return next(factors) * sums + next(factors) * others, common


def _with_ones(v: Tensor) -> Tensor:
    """Return values and a column of ones."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def _lower(size: int, like: Tensor) -> Tensor:
    """Return which keys of a chunk its queries see."""
    return torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
