"""The product in plain PyTorch, linear in the length: every derivative that torch can take of its own operations.

Fused backends have a backward of their own and nothing else. Forward-mode derivatives, torch.func's transforms (vmap,
jvp, jacrev, ...) and derivatives of gradients go through here instead; results are the same, features are kept for the
whole sequence. `ops/transforms.py` says when. Programs for ONNX hold these operations, too: there is no loop over the
length in them.

An exponential map is two softmax attentions, exact and without a maximum of its own:

    lse_r = log sum_j exp(omega_r.k_j + b_j)        A_r = sum_j softmax_j(omega_r.k_j + b_j) v_j
    out_i = sum_r softmax_r(omega_r.q_i + a_r + lse_r) A_r

If causal, a chunk of queries sees what was before it as those R entries (A_r, lse_r), and its own keys one by one. All
chunks are worked on at once; what was before each is added up by doubling (`_Chunks.before`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from klformer.ops.precision import full_precision
from klformer.ops.spectral_product.operands import FLOOR, SpectralOperands, paired_frequencies

#: Queries that see each other one by one, where it is causal.
CHUNK = 32
#: How often chunks are added up in a program whose length is not known: enough for 2**25 tokens.
DOUBLINGS = 20
#: The log-weight of what is not there: below all others, but a number, of which derivatives are numbers too. What is
#: not seen is twice as far away, so that a query that sees nothing has the zeros of keys that are not there.
NOTHING = -1e30
UNSEEN = 2 * NOTHING


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
    if not k.shape[-2]:
        return operands.q.new_zeros(*operands.q.shape[:-1], v.shape[-1])
    chunks = _Chunks(k)
    scores_q, own, scores_k, v, bias = (chunks.split(x) for x in (scores_q, own, scores_k, v, bias))
    largest = scores_k.detach().amax(-2)  # (B, H, chunks, R)
    weighted = (scores_k - largest.unsqueeze(-2)).exp().transpose(-1, -2)
    past, reference = chunks.before(weighted @ _with_ones(v), largest)
    count = past[..., -1:].masked_fill(past[..., -1:] == 0, 1)
    to_past = scores_q + (reference + count.squeeze(-1).log()).unsqueeze(-2)
    # One key of every chunk after the other: all pairs at once would take the memory of a chunk of features a token.
    to_own = torch.stack(
        [
            pad((scores_q[..., j:, :] + own[..., j, None, :]).logsumexp(-1) + bias[..., j, None], (j, 0), value=UNSEEN)
            for j in range(chunks.size)
        ],
        -1,
    )
    weights = torch.cat([to_past, to_own], -1).softmax(-1)
    return chunks.join(weights @ torch.cat([past[..., :-1] / count, v], -2))


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
    columns = _with_ones(v)
    if not k.shape[-2]:
        return torch.zeros_like(operands.q[..., :1], dtype=v.dtype).expand(*operands.q.shape[:-1], v.shape[-1])
    if not operands.causal:
        weighted = (bias - bias.detach().amax(-1, keepdim=True)).exp().unsqueeze(-1) * columns
        return _quotient(phi_q @ (phi_k.transpose(-1, -2) @ weighted), weighted.sum(-2, keepdim=True), smoothing)
    chunks = _Chunks(k)
    phi_q, phi_k, columns, bias = (chunks.split(x) for x in (phi_q, phi_k, columns, bias))
    fixed = bias.detach()
    heaviest = fixed.amax(-1, keepdim=True)  # (B, H, chunks, 1)
    weighted = (bias - heaviest).exp().unsqueeze(-1) * columns
    past, reference = chunks.before(phi_k.transpose(-1, -2) @ weighted, heaviest)
    lower = _lower(chunks.size, bias)
    # Of all keys that a query sees, (B, H, chunks, chunk).
    largest = torch.maximum(fixed.unsqueeze(-2).masked_fill(~lower, UNSEEN).amax(-1), reference)
    seen = (bias.unsqueeze(-2) - largest.unsqueeze(-1)).clamp(max=0).exp().masked_fill(~lower, 0)
    factor = (reference - largest).exp().unsqueeze(-1)
    sums = (phi_q @ phi_k.transpose(-1, -2) * seen) @ columns + factor * (phi_q @ past)
    # Where there is smoothing, the last feature of a key is 1.
    totals = sums if smoothing is None else seen @ columns + factor * past[..., -1:, :]
    return chunks.join(_quotient(sums, totals, None if smoothing is None else smoothing.unsqueeze(-1)))


class _Chunks:
    """A causal sequence in chunks that are worked on together: (B, H, length, ...) as (B, H, chunks, size, ...).

    The last chunk is filled up with copies of the last token, which nobody before it sees.
    """

    def __init__(self, keys: Tensor) -> None:
        self._length, self._device = keys.shape[-2], keys.device
        # An exported program is for lengths that are not known. It has a chunk too many, so that there are never fewer
        # than two: torch makes a program of its own for an axis of one.
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

    def before(self, sums: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """What came before each chunk, added up: after n rounds a chunk has the sums of 2^n chunks, itself the last.

        Args:
            sums: Of each chunk, (B, H, chunks, rows, .).
            reference: The logarithms that they are relative to, (B or 1, H or 1, chunks, rows or 1), constants.
        """
        for round_number in range(self._doublings):
            others, theirs = self._shifted(sums, reference, 2**round_number)
            common = torch.maximum(reference, theirs)
            sums = (reference - common).exp().unsqueeze(-1) * sums + (theirs - common).exp().unsqueeze(-1) * others
            reference = common
        return self._shifted(sums, reference, 1)

    def _shifted(self, sums: Tensor, reference: Tensor, distance: int) -> tuple[Tensor, Tensor]:
        """Those of the chunk that many chunks before; nothing where there is none."""
        places = torch.arange(self._number, device=self._device) - distance
        sums, reference = (x.index_select(2, places.clamp(min=0)) for x in (sums, reference))
        none = (places < 0)[:, None]
        return sums.masked_fill(none.unsqueeze(-1), 0), reference.masked_fill(none, NOTHING)


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


def _with_ones(v: Tensor) -> Tensor:
    """Values and a column of ones."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def _lower(size: int, like: Tensor) -> Tensor:
    """Which keys of a chunk its queries see."""
    return torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
