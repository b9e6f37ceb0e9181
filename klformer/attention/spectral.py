"""Attention with a kernel of finitely many features: everything that needs no more than the kernel.

A subclass says what the kernel is at present (`present`), and how queries, keys and their weights go into it. States
know the kernel that they were absorbed with: those of another attention, or of another draw of the noise, are refused.

Near and far. With a window w, a query sees the keys at a distance of at most w exactly besides, and both results are
merged by their log-sums:

    weight of key j for query i  =  kappa(q_i, k_j) + [|i - j| <= w] exp(g + t q_i.k_j / sqrt D)

g is a log-gain of the near part and t its temperature, a head its own, both learned. Linear in the length.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from klformer.attention.base import AttentionMechanism, AttentionSizes, Capabilities
from klformer.checks import check_count, check_number
from klformer.errors import ArgumentError, ArgumentTypeError
from klformer.ops.near import near_attention
from klformer.ops.precision import full_precision
from klformer.ops.shapes import check_key_bias
from klformer.ops.spectral_product import Call, SpectralKernel, absorb, attend, causal, kept_keys, read
from klformer.ops.spectral_product.decoding import DecodingState
from klformer.ops.spectral_product.operands import NO_KEY, Step
from klformer.ops.spectral_product.parts import PartProduct, Parts, beyond_the_ends
from klformer.ops.spectral_product.state import KernelState

#: Where the log-gain of the near part starts from scratch: a model that looks at its neighbours first learns later what
#: is far.
NEAR_GAIN = -4.0


class SpectralAttention(AttentionMechanism):
    """Attention with a kernel of finitely many features, linear in the length.

    Args:
        sizes: Heads, and sizes of queries and values.
        window: Keys w on each side that a query sees exactly, besides the kernel; none if 0.
        near_gain: Where the log-gain of the near part starts: low where a model is trained from scratch, 0 where it is
            to take the place of softmax.

    Raises:
        ArgumentError: the window is no whole number of at least 0.

    Examples:
        >>> import torch, klformer
        >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
        >>> present = attention.present()
        >>> present.feature_map.name, attention.key_bias(present, torch.randn(1, 2, 5, 8), None, None)
        ('prf', None)
        >>> attention.backend
        'auto'
        >>> q = torch.randn(1, 2, 5, 8)
        >>> attention.as_query(q) is q, attention.as_key(q) is q, attention.query_log_weights(present, q).shape
        (True, True, torch.Size([1, 2, 5]))
    """

    supports_key_bias = True
    supports_parts = True

    def __init__(self, sizes: AttentionSizes, *, window: int = 0, near_gain: float = NEAR_GAIN) -> None:
        super().__init__(sizes)
        check_count("window", window, minimum=0)
        check_number("near_gain", near_gain, minimum=-math.inf)
        self.window = window
        if window:
            self.supports_cross = False
            #: (H,): the log-gain g of the near part, and the logarithm of its temperature t.
            self.near_log_gain = nn.Parameter(torch.full((sizes.num_heads,), float(near_gain)))
            self.near_log_temperature = nn.Parameter(torch.zeros(sizes.num_heads))

    @classmethod
    def capabilities(cls, **options: Any) -> Capabilities:
        found = super().capabilities(**options)
        return replace(found, cross=False) if options.get("window") else found

    @property
    def backend(self) -> str:
        """Who computes the products: "auto", or a name as in `klformer.spectral_product`."""
        return "auto"

    @abstractmethod
    def present(self) -> SpectralKernel:
        """Return the kernel of the present frequencies.

        Returns:
            What the product takes.
        """

    def key_bias(
        self, present: SpectralKernel, k: Tensor, key_mask: Tensor | None, key_bias: Tensor | None
    ) -> Tensor | None:
        """Return the log-weights of keys besides the envelope of the present kernel, (B or 1, H or 1, S).

        Args:
            present: What `present` gives.
            k: Keys (B, H, S, D).
            key_mask: (B or 1, H or 1, S), True = keep.
            key_bias: Those that are given, which are among them.
        """
        return key_bias

    def as_query(self, q: Tensor) -> Tensor:
        """Return queries (B, H, L, .) as the kernel takes them.

        Args:
            q: (B, H, L, D).
        """
        return q

    def as_key(self, k: Tensor) -> Tensor:
        """Return keys (B, H, S, .) as the kernel takes them.

        Args:
            k: (B, H, S, D).
        """
        return k

    def query_log_weights(self, present: SpectralKernel, q: Tensor) -> Tensor | None:
        """Return the envelope of queries (B, H, L), which counts beside near keys; None for 0.

        Args:
            present: What `present` gives.
            q: Queries (B, H, L, D).
        """
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        return self._attend(q, k, v, key_mask, None, causal)

    def attend_weighted(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, key_bias: Tensor, causal: bool
    ) -> Tensor:
        return self._attend(q, k, v, key_mask, key_bias, causal)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, key_bias: Tensor | None, causal: bool
    ) -> Tensor:
        if self.parts is not None:
            return self.finish(self.begin(k, v, key_mask=key_mask, key_bias=key_bias, causal=causal), q)
        present, mask = self.present(), kept_keys(key_mask, key_bias)
        bias = self.key_bias(present, k, mask, key_bias)
        query, key, who = self.as_query(q), self.as_key(k), self.backend
        if not self.window:
            return attend(present, query, key, v, key_mask=mask, key_bias=bias, causal=causal, backend=who)[0]
        step: Step = "causal" if causal else "product"
        far = Call(step, present, q=query, k=key, v=v, key_mask=mask, key_bias=bias)
        return self._with_near(present, q, far, k, v, key_mask=key_mask, key_bias=key_bias, causal=causal)

    def _with_near(
        self,
        present: SpectralKernel,
        q: Tensor,
        far: tuple[Tensor, Tensor] | Call,
        k: Tensor,
        v: Tensor,
        **options: Any,
    ) -> Tensor:
        """Return the result (B, H, L, E) of both parts, given that of the kernel or its call, and what is near."""
        inside = isinstance(far, Call) and present.norm_coefficient  # then near_attention counts the norms of queries
        offset = -self.near_log_gain[:, None] if inside else self._far_offset(present, q)
        options |= {"window": self.window, "scale": self._near_scale(), "backend": self.backend}
        return near_attention(q, k, v, far=far, far_offset=offset, **options)[0]

    def _near_scale(self) -> Tensor:
        """Return what near scores are multiplied by, (H,)."""
        return self.near_log_temperature.exp() * self.head_dim**-0.5

    def _far_offset(self, present: SpectralKernel, q: Tensor) -> Tensor:
        """Return what log-sums of the kernel have besides, relative to near keys, which lack their gain."""
        weights, gain = self.query_log_weights(present, q), self.near_log_gain[:, None]
        return -gain if weights is None else weights - gain

    def begin(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None, causal: bool
    ) -> "PartProduct | NearPart":
        self._check_operands(k, k, v, key_mask, causal)
        parts, present, mask = self._known_parts(), self.present(), kept_keys(key_mask, key_bias)
        bias = self.key_bias(present, k, mask, key_bias)
        keys, who = self.as_key(k), self.backend
        far = PartProduct(present, keys, v, key_mask=mask, key_bias=bias, causal=causal, parts=parts, backend=who)
        return self._begin_near(far, k, v, mask, key_bias, causal, parts) if self.window else far

    def _begin_near(
        self,
        far: PartProduct,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        key_bias: Tensor | None,
        causal: bool,
        parts: Parts,
    ) -> "NearPart":
        """Fetch the keys and values of other parts that are neighbours of tokens of this one."""
        rows, kind = k.shape[:3], torch.promote_types(k.dtype, torch.float32)
        kept = torch.ones(rows, dtype=torch.bool, device=k.device) if key_mask is None else key_mask.expand(rows)
        bias = k.new_zeros(rows) if key_bias is None else key_bias.expand(rows)
        own = [x.masked_fill(~kept.unsqueeze(-1), 0).to(kind) for x in (k, v, bias.unsqueeze(-1))]
        joined = torch.cat([*own, kept.unsqueeze(-1).to(kind)], -1).transpose(1, 2).flatten(2)  # (B, S, H .)
        before, after = beyond_the_ends(joined, self.window, parts)
        together = torch.cat([before, joined, after], 1)
        together = together.view(*together.shape[:2], self.num_heads, -1).transpose(1, 2)
        keys, values, weights, there = torch.split(together, [k.shape[3], v.shape[3], 1, 1], dim=-1)
        weights = weights.masked_fill(there == 0, -torch.inf).squeeze(-1)
        return NearPart(far, keys, values, weights, causal)

    def finish(self, begun: "PartProduct | NearPart", q: Tensor) -> Tensor:
        if isinstance(begun, PartProduct):
            return begun.read(self.as_query(q))[0]
        far, options = begun.far.read(self.as_query(q)), {"key_bias": begun.key_bias, "causal": begun.causal}
        return self._with_near(begun.far.kernel, q, far, begun.k, begun.v, before=self.window, **options)

    def kernel_state(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None
    ) -> KernelState:
        """Return the state of keys and values with the present frequencies.

        It can be read from, merged and written to a file; the kernel's envelope is in it, a window is not. Gradients
        flow through it.

        Args:
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S).

        Raises:
            ArgumentError: shapes do not fit the attention, or each other.

        Examples:
            >>> import torch, klformer
            >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
            >>> k, v, q = torch.randn(3, 1, 2, 50, 8)
            >>> state = attention.kernel_state(k, v)
            >>> torch.allclose(state.read(q), attention(q, k, v), atol=1e-5)
            True
        """
        self._check_operands(k, k, v, key_mask, causal=False)
        check_key_bias(key_bias, k)
        present = self.present().copy()
        bias = self.key_bias(present, k, kept_keys(key_mask, key_bias), key_bias)
        return self._of_here(absorb(present, self.as_key(k), v, key_mask=key_mask, key_bias=bias, backend=self.backend))

    def initial_state(self, batch_size: int) -> "KernelState | NearState":
        far = self._of_here(self._empty(batch_size))
        return NearState(far, *self._no_neighbours(batch_size)) if self.window else far

    def prepare_decoding(self, batch_size: int) -> "KernelState | NearState":
        far = self._of_here(DecodingState(self._empty(batch_size)))
        return NearRing(far, *self._no_neighbours(batch_size)) if self.window else far

    def _empty(self, batch_size: int) -> KernelState:
        present = self.present().copy()
        like = self.as_key(self._anchor.new_empty(1, 1, 0, self.head_dim))
        sizes = {"batch_size": batch_size, "num_heads": self.num_heads, "value_dim": self.value_dim}
        return KernelState.empty(present, like=like, **sizes)

    def _no_neighbours(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        rows, held = (batch_size, self.num_heads, self.window + 1), self._anchor.new_zeros
        return held(*rows, self.head_dim), held(*rows, self.value_dim), held(*rows).fill_(-torch.inf)

    def absorb(
        self,
        state: "KernelState | NearState",
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> "KernelState | NearState":
        """Return the state after more keys and values.

        Args:
            state: Of `initial_state`, which stays as it is, or of `prepare_decoding`, which is changed.
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S).

        Raises:
            ArgumentError: shapes do not fit the attention, each other, or the state; or the state is of another kernel.
        """
        self._check_operands(k, k, v, key_mask, causal=False)
        far = self._far(state)
        bias = self.key_bias(far.kernel, k, kept_keys(key_mask, key_bias), key_bias)
        after = self._of_here(far.absorb(self.as_key(k), v, key_mask=key_mask, key_bias=bias, backend=self.backend))
        return state.after(after, k, v, key_mask, key_bias) if isinstance(state, NearState) else after

    def read(self, state: "KernelState | NearState", q: Tensor) -> Tensor:
        self._check_heads("q", q)
        far = self._far(state)
        result = read(far.kernel, self.as_query(q), far, backend=self.backend)
        if not isinstance(state, NearState):
            return result[0]
        if q.shape[2] != 1:
            raise ArgumentError(
                f"with a window a state is read by the last token that it has absorbed, got {q.shape[2]} queries; "
                "extend reads and absorbs several, and a memory is for attention without a window"
            )
        return state.near(q, self._near_scale(), (result[0], result[1] + self._far_offset(far.kernel, q)))

    def merge(self, first: "KernelState | NearState", second: "KernelState | NearState") -> "KernelState | NearState":
        merged = self._of_here(KernelState.merge(self._far(first), self._far(second)))
        if not (isinstance(first, NearState) and isinstance(second, NearState)):
            return merged
        # Neighbours of different documents do not mix: the next token's are those of the second, if it has any.
        some = (second.key_bias > -torch.inf).any(-1).any(1)[:, None, None]  # (B, 1, 1)
        keys, values = (torch.where(some.unsqueeze(-1), x, y) for x, y in ((second.k, first.k), (second.v, first.v)))
        return NearState(merged, keys, values, torch.where(some, second.key_bias, first.key_bias))

    def extend(
        self, state: "KernelState | NearState", q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None
    ) -> "tuple[Tensor, KernelState | NearState]":
        self._check_operands(q, k, v, key_mask, causal=True)
        far = self._far(state)
        bias = self.key_bias(far.kernel, k, kept_keys(key_mask, None), None)
        operands, who = (self.as_query(q), self.as_key(k), v), self.backend
        out, log_sum, after = causal(far.kernel, *operands, state=far, key_mask=key_mask, key_bias=bias, backend=who)
        after = self._of_here(DecodingState(after) if isinstance(far, DecodingState) else after)
        if not isinstance(state, NearState):
            return out, after
        keys, values, biases = state.followed_by(k, v, key_mask, None)
        options = {"key_bias": biases, "causal": True, "before": state.k.shape[2]}
        out = self._with_near(far.kernel, q, (out, log_sum), keys, values, **options)
        return out, state.after(after, k, v, key_mask, None)

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: "KernelState | NearState"
    ) -> "tuple[Tensor, KernelState | NearState]":
        far = self._far(state)
        if torch.is_grad_enabled() and not isinstance(far, DecodingState):
            return self.extend(state, q_t, k_t, v_t)
        own = far if isinstance(far, DecodingState) else DecodingState(far)
        bias = self.key_bias(far.kernel, k_t, None, None)
        q, k, who = self.as_query(q_t), self.as_key(k_t), self.backend
        result = own.step(q, k, v_t, bias, backend=who)
        after = far if own is far else self._of_here(KernelState(far.kernel, own.sums))
        if not isinstance(state, NearState):
            return result[0], after
        if isinstance(state, NearRing):
            if state.stamp is not far.made_by or far.made_by is None:
                state.look_at(far.made_by, self._near_scale(), self.near_log_gain, far.kernel.norm_coefficient)
            weights = None if far.kernel.norm_coefficient else self.query_log_weights(far.kernel, q_t)
            with torch.no_grad():
                return state.step(q_t, k_t, v_t, *result, weights), state
        state = state.after(after, k_t, v_t, None, None)
        return state.near(q_t, self._near_scale(), (result[0], result[1] + self._far_offset(far.kernel, q_t))), state

    def _far(self, state: "KernelState | NearState") -> KernelState:
        """Return the kernel's part of a state; raise ArgumentError unless it is of this attention as it is now."""
        far = state.far if isinstance(state, NearState) else state
        if not isinstance(far, KernelState):
            raise ArgumentTypeError(
                f"state must be of this attention's own, as of initial_state, got {type(far).__name__}"
            )
        if isinstance(state, NearState) != (self.window > 0):
            raise ArgumentError("the state is of an attention with another window")
        stamp = self._stamp()
        if far.made_by != stamp and not torch.compiler.is_compiling():
            if not far.kernel.same_as(self.present()):
                raise ArgumentError(
                    "the state is of another attention, or of another draw of its noise, or of parameters that have "
                    "changed since: absorb again"
                )
            far.made_by = stamp
        return far

    def _of_here(self, state: KernelState) -> KernelState:
        """Return a state, and remember that it is of this attention as it is now."""
        state.made_by = self._stamp()
        return state

    def _stamp(self) -> Any:
        """Return what changes when a parameter or the noise does; equal for nothing else."""
        if torch.compiler.is_compiling():
            return None
        tensors = [*self.parameters(), *self.buffers()]
        return id(self), *((x.data_ptr(), None if x.is_inference() else x._version) for x in tensors)

    def _check_heads(self, name: str, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.num_heads or x.shape[3] != self.head_dim:
            expected = f"(batch, {self.num_heads}, length, {self.head_dim})"
            raise ArgumentError(f"{name} must have shape {expected}, got {tuple(x.shape)}")


@dataclass(frozen=True)
class NearPart:
    """A product of one part of a sequence, begun: that of the kernel, and the keys that are near to its tokens."""

    far: PartProduct
    k: Tensor  # (B, H, w + S + w, D)
    v: Tensor  # (B, H, w + S + w, E)
    key_bias: Tensor  # (B, H, w + S + w), -inf where there is no key
    causal: bool


@dataclass(eq=False)
class NearState:
    """The state of attention with a window: that of the kernel, and the last w + 1 tokens. It is never changed."""

    far: KernelState
    k: Tensor  # (B, H, w + 1, D)
    v: Tensor  # (B, H, w + 1, E)
    key_bias: Tensor  # (B, H, w + 1), -inf where there is no token

    @property
    def num_bytes(self) -> int:
        """What the sums and the tokens take, without the kernel."""
        return self.far.num_bytes + self.k.nbytes + self.v.nbytes + self.key_bias.nbytes

    def followed_by(
        self, k: Tensor, v: Tensor, key_mask: Tensor | None, key_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens with others behind them: keys, values, and log-weights (B, H, S)."""
        bias = k.new_zeros(1, 1, 1) if key_bias is None else key_bias
        bias = bias.expand(*k.shape[:3])
        if key_mask is not None:
            bias = bias.masked_fill(~key_mask[:, None], -torch.inf)
        pairs = ((self.k, k), (self.v, v), (self.key_bias, bias))
        keys, values, biases = (torch.cat([old.to(new.dtype), new], dim=2) for old, new in pairs)
        return keys, values, biases

    def after(
        self, far: KernelState, k: Tensor, v: Tensor, key_mask: Tensor | None, key_bias: Tensor | None
    ) -> "NearState":
        """Return the state after more tokens, of which the kernel's part is given."""
        size = self.k.shape[2]
        kept = (x[:, :, x.shape[2] - size :] for x in self.followed_by(k, v, key_mask, key_bias))
        return type(self)(far, *kept)

    def near(self, q: Tensor, scale: Tensor, far: tuple[Tensor, Tensor]) -> Tensor:
        """Return the result of the last token's query (B, H, 1, D) against all tokens, merged with that of the kernel.

        Args:
            q: The query.
            scale: What scores are multiplied by, (H,).
            far: The result of the kernel, and its log-sum relative to those of the tokens.
        """
        with full_precision(q) as dtype:
            for x in (self.k, self.v):
                dtype = torch.promote_types(dtype, x.dtype)
            scores = (q.to(dtype) * scale[:, None, None]) @ self.k.to(dtype).mT + self.key_bias.to(dtype).unsqueeze(2)
            weights = torch.cat([scores, far[1].to(dtype).clamp(min=NO_KEY).unsqueeze(-1)], -1).softmax(-1)
            return (weights @ torch.cat([self.v, far[0]], 2).to(dtype)).to(q.dtype)


class NearRing(NearState):
    """The state of `prepare_decoding`: a step replaces the oldest token in place. For inference.

    The result of the kernel stands behind the tokens as one more of them, so that a step has one softmax.
    """

    @torch.no_grad()
    def __init__(self, far: KernelState, k: Tensor, v: Tensor, key_bias: Tensor) -> None:
        self.far, self._size, self._next = far, k.shape[2], 0
        self._unread_biases = self._size  # how many may not be 0
        self._held = [_with_one_more(x) for x in (k, v, key_bias)]
        keys, values, biases = self._held
        self._slots = list(zip(*(torch.split(x, 1, 2) for x in self._held), strict=True))
        self._flat = biases.flatten(0, 1).unsqueeze(1), keys.flatten(0, 1).mT, values.flatten(0, 1)
        #: Of the attention as it was, (H, 1, 1) and (H, 1): its scale of scores, its log-gain, and what makes of a
        #: query a key whose score is the envelope of norms; None for no such envelope.
        self.stamp: Any = None
        self._scale = self._gain = biases
        self._norm: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return NearRing, (self.far, self.k, self.v, self.key_bias)

    def _in_order(self, number: int) -> Tensor:
        return self._held[number][:, :, : self._size].roll(-self._next, 2)

    k = property(lambda self: self._in_order(0))
    v = property(lambda self: self._in_order(1))
    key_bias = property(lambda self: self._in_order(2))

    def look_at(self, stamp: Any, scale: Tensor, log_gain: Tensor, norm_coefficient: float) -> None:
        """Take what a step needs of an attention as it is now.

        Args:
            stamp: What changes when the attention does.
            scale: What scores are multiplied by, (H,).
            log_gain: (H,).
            norm_coefficient: As in `SpectralKernel`.
        """
        self.stamp, self._gain, self._scale = stamp, log_gain.detach()[:, None], scale.detach()[:, None, None]
        self._norm = -norm_coefficient / self._scale if norm_coefficient else None

    def step(self, q: Tensor, k: Tensor, v: Tensor, far: Tensor, log_sum: Tensor, log_weights: Tensor | None) -> Tensor:
        """Replace the oldest token (B, H, 1, .), and return the result of all and of the kernel for its query.

        Args:
            q: The query (B, H, 1, D).
            k: The key of its token.
            v: The value of its token.
            far: The result of the kernel (B, H, 1, E).
            log_sum: Its log-sum (B, H, 1).
            log_weights: What this has besides, (B, H, 1); None for nothing but an envelope of norms.
        """
        key, value, bias = self._slots[self._next]
        key.copy_(k)
        value.copy_(v)
        if self._unread_biases:
            bias.zero_()
            self._unread_biases -= 1
        self._next = (self._next + 1) % self._size
        key, value, bias = self._slots[-1]
        value.copy_(far)
        torch.sub(log_sum, self._gain, out=bias)
        if log_weights is not None:
            bias += log_weights
        if self._norm is not None:
            torch.mul(q, self._norm, out=key)
        biases, keys, values = self._flat
        query = (q * self._scale).to(keys.dtype).view(biases.shape[0], 1, -1)
        weights = torch.baddbmm(biases, query, keys).softmax(-1)
        return torch.bmm(weights, values).view(far.shape).to(q.dtype)


def _with_one_more(x: Tensor) -> Tensor:
    """Return room for (B, H, w + 1, ...) and one more, 0, in float32 at least."""
    more = x.new_zeros(*x.shape[:2], 1, *x.shape[3:])
    return torch.cat([x, more], 2).to(torch.promote_types(x.dtype, torch.float32))
