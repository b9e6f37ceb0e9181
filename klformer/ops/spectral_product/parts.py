"""A sequence in parts, each with somebody else: who has a part sees the sums of the others.

    bidirectional   the sums of all parts, relative to the largest log-scale:        one maximum, one sum
    causal          the sums of the parts before, relative to the largest of theirs

The sums have the size of the feature space, not of the sequence. This file has the numerics, and says what it needs of
the others as `Parts`; who they are is no matter here (`klformer/distributed`).

A product is begun with the keys and ended with the queries: what brings sums together can be under way while the
queries are made, and their gradients while those of the queries are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from klformer.errors import ArgumentError
from klformer.ops.spectral_product.dispatch import choose_backend
from klformer.ops.spectral_product.operands import NO_KEY, Call, SpectralKernel, Sums
from klformer.ops.transforms import is_transformed

#: Gives a result that was begun; to be called once.
Pending = Callable[[], Tensor]


class Parts(ABC):
    """Those who have the parts of a sequence, one part each, in the order of the sequence.

    Every method is called by all of them, in the same order. Those that are differentiable take the loss to be the sum
    of everybody's.
    """

    #: Which part is here, of how many.
    index: int
    count: int

    @abstractmethod
    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum; no gradient."""

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """Return everybody's x, (count, *x.shape); no gradient."""

    @abstractmethod
    def begin_sum(self, x: Tensor) -> Pending:
        """Begin the sum of everybody's x. Differentiable."""

    @abstractmethod
    def begin_combination(self, x: Tensor, factors: Tensor, of_others: Tensor) -> Pending:
        """Begin sum_p factors_p x_p over the parts p. Differentiable in x.

        Args:
            x: That of this part.
            factors: (count, ...), broadcastable to x.
            of_others: (count, ...), those that the others have for this part: gradients come back with them.
        """

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of everybody's x. Differentiable."""
        return self.begin_sum(x)()

    def lengths(self, length: int, device: torch.device) -> Tensor:
        """Return how long the parts are, (count,)."""
        return self.gather(torch.tensor(length, device=device))

    def before(self, count: int | Tensor, device: torch.device) -> Tensor:
        """Return the sum of the counts of the parts before this one: its length, (), or one for each sequence, (B,)."""
        return self.gather(torch.as_tensor(count, device=device))[: self.index].sum(0)


def beyond_the_ends(x: Tensor, reach: int, parts: Parts) -> tuple[Tensor, Tensor]:
    """Return the vectors (B, reach, D) of the other parts just before and just after this one, (B, L, D); zero beyond
    the sequence.

    At every place where two parts meet a window reaches as far to both sides. All parts put what they have of it there:
    a part may be shorter than the reach, or empty. Also what is empty depends on x, so that backward asks everybody.
    """
    lengths, size = parts.lengths(x.shape[1], x.device).tolist(), 2 * reach
    begin = sum(lengths[: parts.index])
    windows = []
    for meeting in range(1, parts.count):
        ahead = begin - (sum(lengths[:meeting]) - reach)  # of the window's begin, that of this part
        first, last = (min(max(place, 0), size) for place in (ahead, ahead + x.shape[1]))
        own = x[:, max(first - ahead, 0) : max(last - ahead, 0)]
        windows.append(pad(own, (0, 0, first, size - last)))
    edge = x.new_zeros(x.shape[0], size, x.shape[2])
    if not windows:
        return edge[:, :reach], edge[:, reach:]
    windows = [edge, *parts.sum(torch.stack(windows)), edge]
    return windows[parts.index][:, :reach], windows[parts.index + 1][:, reach:]


class PartProduct:
    """Attention of the queries of this part to the keys of all parts, or if causal to those before each query.

    Args:
        kernel: As in `Call`, likewise what follows.
        k: Keys of this part (B, H, S, D); S may be 0, and differ from part to part.
        v: Values of this part (B, H, S, E).
        key_mask: (B or 1, H or 1, S), True = keep.
        key_bias: (B or 1, H or 1, S).
        causal: Query i sees keys 0 .. i of its own part, and all of those before.
        parts: The others.
        backend: As in `spectral_product`.
    """

    def __init__(
        self,
        kernel: SpectralKernel,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None,
        key_bias: Tensor | None,
        causal: bool,
        parts: Parts,
        backend: str = "auto",
    ) -> None:
        self.kernel = kernel
        self._call = Call("absorb", kernel, k=k, v=v, key_mask=key_mask, key_bias=key_bias)
        self._causal, self._backend = causal, backend
        if is_transformed(*self._call.tensors().values()):
            raise ArgumentError(
                "a sequence in parts has first derivatives by backward() and nothing else: forward-mode derivatives "
                "and torch.func's transforms are for a whole sequence"
            )
        values, weights, log_scale = choose_backend(self._call, backend).absorb(self._call)
        joined = torch.cat([values, weights.unsqueeze(-1)], -1)  # (B, H, F, E + 1)
        if causal:
            factors, of_others, self._log_scale = _factors_before(parts.gather(log_scale), parts.index)
            self._pending = parts.begin_combination(joined, factors.unsqueeze(-1), of_others.unsqueeze(-1))
        else:
            self._log_scale = parts.largest(log_scale)
            self._pending = parts.begin_sum(joined * (log_scale - self._log_scale).exp().unsqueeze(-1))

    def read(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results (B, H, L, E) of the queries (B, H, L, D) and their log-sums (B, H, L); if causal there are
        as many queries as keys."""
        own, together = self._call, self._pending()
        sums = Sums(together[..., :-1], together[..., -1], self._log_scale)
        if not self._causal:
            call = Call("read", own.kernel, q=q, sums=sums)
            return choose_backend(call, self._backend).read(call)
        if q.shape[2] != own.tokens.shape[2]:
            raise ArgumentError(f"causal needs as many queries as keys, got {q.shape[2]} and {own.tokens.shape[2]}")
        call = replace(own, step="causal", q=q, sums=sums)
        return choose_backend(call, self._backend).causal(call)[:2]


def _factors_before(log_scales: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of everybody's sums in those before a part, the factors that the others have for this part's,
    and what the sums before refer to; log-scales (count, B, H, F or 1)."""
    numbers = torch.arange(log_scales.shape[0], device=log_scales.device).view(-1, 1, 1, 1)
    # The first part has nothing before it, and refers to what it likes: its own.
    largest = torch.cat([log_scales[:1], log_scales.cummax(0).values[:-1]])
    factors = (log_scales - largest[index]).clamp(max=0).exp().masked_fill(numbers >= index, 0)
    of_others = (log_scales[index] - largest).clamp(max=0).exp().masked_fill(numbers <= index, 0)
    return factors, of_others, largest[index] if index else torch.full_like(largest[0], NO_KEY)
