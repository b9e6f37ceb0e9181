"""What every attention has in common: the interface and its checks. Their names are in `registry`.

Masks: True = keep, everywhere. An attention sees heads only; the projections around it are in `multihead`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from klformer.checks import check_count
from klformer.errors import ArgumentError
from klformer.ops.shapes import check_key_bias, check_operands
from klformer.ops.spectral_product.parts import Parts


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes that every attention is built with.

    Args:
        num_heads: Heads H.
        head_dim: Size D of queries and keys.
        value_dim: Size E of values; D if None.
        max_len: Longest sequence that will be seen; only some attentions need it.

    Raises:
        ArgumentError: a size is not a whole number of at least 1.

    Examples:
        >>> import klformer
        >>> sizes = klformer.AttentionSizes(num_heads=4, head_dim=16, max_len=1000)
        >>> sizes
        AttentionSizes(num_heads=4, head_dim=16, value_dim=None, max_len=1000)
        >>> sizes.known_max_len()
        1000
    """

    num_heads: int
    head_dim: int
    value_dim: int | None = None
    max_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "value_dim", "max_len"):
            size = getattr(self, name)
            if size is not None or name in ("num_heads", "head_dim"):
                check_count(name, size)

    def known_max_len(self) -> int:
        """`max_len`, for an attention whose parameters depend on it; its base class has seen that it is there."""
        assert self.max_len is not None
        return self.max_len


@dataclass(frozen=True)
class Capabilities:
    """What an attention can do, known without building one: each as `AttentionMechanism` has it."""

    causal: bool
    decoding: bool
    cross: bool
    key_bias: bool
    needs_max_len: bool
    uses_queries: bool
    uses_keys: bool
    cost: str


class AttentionMechanism(nn.Module, ABC):
    """Attention of several heads: q (B,H,L,D), k (B,H,S,D), v (B,H,S,E) -> (B,H,L,E).

    A subclass has `attend`, says below what it can't do, and takes `sizes` and its own options as keywords.

    Args:
        sizes: `forward` refuses sequences longer than its max_len, if there is one.

    Raises:
        ArgumentError: the mechanism needs a max_len, and there is none.

    Examples:
        The mean of all keys up to the query, as an attention of its own:

        >>> import torch, klformer
        >>> class Average(klformer.AttentionMechanism):
        ...     supports_decoding = False
        ...     uses_queries = uses_keys = False
        ...
        ...     def attend(self, q, k, v, *, key_mask, causal):
        ...         seen = torch.ones(q.shape[2], k.shape[2])
        ...         seen = (seen.tril() if causal else seen).expand(len(q), 1, -1, -1)
        ...         if key_mask is not None:
        ...             seen = seen * key_mask[:, None, None]
        ...             v = v.masked_fill(~key_mask[:, None, :, None], 0)
        ...         return seen @ v / seen.sum(-1, keepdim=True).clamp(min=1)
        >>> klformer.register_attention("average", Average, "the mean of all values")
        >>> attention = klformer.build_attention("average", num_heads=2, head_dim=8)
        >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        >>> attention(q, k, v, causal=True).shape
        torch.Size([1, 2, 5, 8])
        >>> Average.capabilities().decoding
        False

        A kernel attention has states as well. A prompt of four tokens is absorbed, and the fifth decoded:

        >>> kernel = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8, num_frequencies=16)
        >>> prompt = kernel.absorb(kernel.initial_state(batch_size=1), k[:, :, :4], v[:, :, :4])
        >>> out, state = kernel.step(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], prompt)
        >>> torch.allclose(out, kernel(q, k, v, causal=True)[:, :, 4:], atol=1e-5)
        True
        >>> kernel.read(kernel.merge(prompt, state), q).shape
        torch.Size([1, 2, 5, 8])
        >>> kernel.features(q, "query").shape
        torch.Size([1, 2, 5, 16])

        Of a sequence in parts the keys are begun with, and ended with the queries (here there is one part):

        >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
        >>> from klformer.distributed import sequence_parallel
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        >>> part = sequence_parallel(kernel, mesh)
        >>> part.finish(part.begin(k, v, causal=True), q).shape
        torch.Size([1, 2, 5, 8])
        >>> destroy_process_group()
    """

    #: Query i can be kept from seeing keys after i.
    supports_causal: bool = True
    #: Sequences can be decoded step by step with a state.
    supports_decoding: ClassVar[bool] = True
    #: Keys may come from another sequence than queries.
    supports_cross: bool = True
    #: Keys may have log-weights.
    supports_key_bias: ClassVar[bool] = False
    #: How the time grows with the length L.
    cost: ClassVar[str] = "L"
    #: Parameters depend on the length, so that max_len must be given.
    needs_max_len: ClassVar[bool] = False
    #: Whether queries and keys have any effect. A layer makes no projections for what is not used.
    uses_queries: bool = True
    uses_keys: bool = True
    #: A sequence may be in parts, each with another process: `begin` and `finish` are there.
    supports_parts: bool = False
    #: Those who have the parts, if it is; `klformer.distributed.sequence_parallel` says so.
    parts: Parts | None = None

    _anchor: Tensor

    def __init__(self, sizes: AttentionSizes) -> None:
        super().__init__()
        if sizes.max_len is None and self.needs_max_len:
            raise ArgumentError(f"{type(self).__name__} needs max_len: the longest sequence that it will see")
        self.num_heads = sizes.num_heads
        self.head_dim = sizes.head_dim
        self.value_dim = sizes.head_dim if sizes.value_dim is None else sizes.value_dim
        self.max_len = sizes.max_len
        # Empty; it only remembers the device and the precision that the module was moved to.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    @classmethod
    def capabilities(cls, **options: Any) -> Capabilities:
        """What an attention of this class with these options can do.

        Args:
            **options: Those of the constructor.
        """
        return Capabilities(
            causal=cls.supports_causal,
            decoding=cls.supports_decoding,
            cross=cls.supports_cross,
            key_bias=cls.supports_key_bias,
            needs_max_len=cls.needs_max_len,
            uses_queries=cls.uses_queries,
            uses_keys=cls.uses_keys,
            cost=cls.cost,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            q: Queries (B, H, L, D).
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep. A query that has no key left gives 0.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S), where the mechanism takes them.
            causal: Query i sees keys 0 .. i only; L must equal S.

        Returns:
            (B, H, L, E), in the type of `v`; computed in the type that all three have in common.

        Raises:
            ValueError: for shapes that do not fit, or for what this mechanism can't do.
        """
        self._check_operands(q, k, v, key_mask, causal)
        kind = v.dtype
        if not q.dtype == k.dtype == kind:
            common = torch.promote_types(torch.promote_types(q.dtype, k.dtype), kind)
            q, k, v = q.to(common), k.to(common), v.to(common)
        if key_bias is None:
            out = self.attend(q, k, v, key_mask=key_mask, causal=causal)
        else:
            check_key_bias(key_bias, k)
            out = self.attend_weighted(q, k, v, key_mask=key_mask, key_bias=key_bias, causal=causal)
        shape = (*q.shape[:3], v.shape[3])
        if not (torch.compiler.is_compiling() or (isinstance(out, Tensor) and out.shape == shape)):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ArgumentError(f"{type(self).__name__} must give a tensor of shape {tuple(shape)}, gave {got}")
        return out.to(kind)

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        """`forward` after its checks, for keys that all weigh the same. A subclass has this one.

        Args:
            q: Queries (B, H, L, D).
            k: Keys (B, H, S, D), in the type of q.
            v: Values (B, H, S, E), in the type of q.
            key_mask: (B, S), True = keep; None keeps all. What is not kept may hold anything, NaN included.
            causal: Query i sees keys 0 .. i only.

        Returns:
            (B, H, L, E); 0 for a query that has no key left.
        """

    def attend_weighted(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, key_bias: Tensor, causal: bool
    ) -> Tensor:
        """`forward` after its checks, for keys with log-weights.

        Args:
            q: Queries (B, H, L, D).
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: (B or 1, H or 1, S); -inf drops a key.
            causal: Query i sees keys 0 .. i only.

        Returns:
            (B, H, L, E).

        Raises:
            ArgumentError: unless `supports_key_bias`.

        Examples:
            >>> import torch, klformer
            >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
            >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
            >>> attention.attend_weighted(q, k, v, key_mask=None, key_bias=torch.zeros(1, 1, 5), causal=False).shape
            torch.Size([1, 2, 5, 8])
        """
        raise ArgumentError(f"{type(self).__name__} has no weights of keys: key_bias must be None")

    def begin(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None, causal: bool
    ) -> Any:
        """Begin with the keys and values of this part of a sequence, for `finish` to end with its queries.

        Args:
            k: Keys of this part, (B, H, S, D).
            v: Its values, (B, H, S, E).
            key_mask: (B, S), True = keep.
            key_bias: Log-weights of the keys, (B or 1, H or 1, S).
            causal: Queries see no later keys, of this part and of others.

        Returns:
            A product whose sums are under way.

        Raises:
            ArgumentError: unless `supports_parts`, and `parts` are known.
        """
        raise ArgumentError(f"{type(self).__name__} needs whole sequences: its keys can't be in parts")

    def finish(self, begun: Any, q: Tensor) -> Tensor:
        """Results of the queries of this part against the keys of all.

        Args:
            begun: What `begin` gave; it is used once.
            q: Queries of this part, (B, H, L, D).

        Returns:
            (B, H, L, E).

        Raises:
            ArgumentError: unless `supports_parts`.
        """
        raise ArgumentError(f"{type(self).__name__} needs whole sequences: its keys can't be in parts")

    def features(self, x: Tensor, role: Literal["query", "key"]) -> Tensor:
        """Explicit features of queries or keys.

        phi(q).phi(k) is what `forward` weighs a key with, but for a factor of the query that cancels.

        Args:
            x: Queries or keys, (B, H, L, D).
            role: "query" or "key"; an envelope belongs to keys.

        Returns:
            (B, H, L, F).

        Raises:
            ArgumentError: the mechanism is not a kernel with finitely many features.
        """
        raise ArgumentError(f"{type(self).__name__} has no explicit features")

    def initial_state(self, batch_size: int) -> Any:
        """The state of decoding before the first token. It is never changed in place: `absorb` and `step` give another.

        For speed see `prepare_decoding`.

        Args:
            batch_size: Sequences B.

        Raises:
            ArgumentError: unless `supports_decoding`.
        """
        raise ArgumentError(f"{type(self).__name__} can't decode step by step")

    def prepare_decoding(self, batch_size: int) -> Any:
        """A state for one generation: `absorb` and `step` change it in place and return it.

        What does not change from token to token is computed once. The parameters and the noise must stay as they are.

        Args:
            batch_size: Sequences B.

        Raises:
            ArgumentError: unless `supports_decoding`.

        Examples:
            >>> import torch, klformer
            >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
            >>> state = attention.prepare_decoding(batch_size=1)
            >>> for q_t, k_t, v_t in torch.randn(5, 3, 1, 2, 1, 8):
            ...     out, state = attention.step(q_t, k_t, v_t, state)
            >>> out.shape
            torch.Size([1, 2, 1, 8])
        """
        return self.initial_state(batch_size)

    def absorb(self, state: Any, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """Return the state after more keys and values.

        Mechanisms with `supports_key_bias` take a `key_bias` as well.

        Args:
            state: Of `initial_state`, which stays as it is, or of `prepare_decoding`, which is changed.
            k: Keys (B, H, S, D).
            v: Values (B, H, S, E).
            key_mask: (B, S), True = keep.

        Raises:
            ArgumentError: unless `supports_decoding`, or for another number of sequences than the state's.
        """
        raise ArgumentError(f"{type(self).__name__} can't decode step by step")

    def read(self, state: Any, q: Tensor) -> Tensor:
        """Return the results of queries against all that the state has absorbed.

        Args:
            state: After `absorb` or `step`; it stays as it is.
            q: Queries (B, H, L, D).

        Returns:
            (B, H, L, E).

        Raises:
            ArgumentError: unless `supports_decoding`, or for another number of sequences than the state's.
        """
        raise ArgumentError(f"{type(self).__name__} can't decode step by step")

    def merge(self, first: Any, second: Any) -> Any:
        """Return the state that has absorbed what two states have, each from `initial_state` on.

        Args:
            first: A state; it stays as it is.
            second: Another, of the same number of sequences and the same draw of the noise.

        Raises:
            ArgumentError: they are of other kernels, draws or numbers of sequences; or this is no kernel attention,
                whose states are sums.
        """
        raise ArgumentError(f"{type(self).__name__} has no states that can be merged: a kernel attention has")

    def extend(
        self, state: Any, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Attend causally to the next tokens, and to all that a state has absorbed before them.

        Args:
            state: What came before; it stays as it is, unless it is of `prepare_decoding`.
            q: Queries (B, H, L, D).
            k: Keys (B, H, L, D).
            v: Values (B, H, L, E).
            key_mask: (B, L), True = keep.

        Returns:
            The results (B, H, L, E), and the state after the tokens.

        Raises:
            ArgumentError: unless it is a kernel attention, or for a state of another.

        Examples:
            >>> import torch, klformer
            >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
            >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
            >>> state, chunks = attention.initial_state(batch_size=1), []
            >>> for chunk in zip(q.split(2, 2), k.split(2, 2), v.split(2, 2)):
            ...     out, state = attention.extend(state, *chunk)
            ...     chunks.append(out)
            >>> torch.allclose(torch.cat(chunks, 2), attention(q, k, v, causal=True), atol=1e-5)
            True
        """
        raise ArgumentError(f"{type(self).__name__} has no states that can be extended: a kernel attention has")

    def step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token of causal attention.

        Args:
            q_t: Its query, (B, H, 1, D).
            k_t: Its key, (B, H, 1, D).
            v_t: Its value, (B, H, 1, E).
            state: What came before.

        Returns:
            The result (B, H, 1, E), and the next state.

        Raises:
            ArgumentError: for more than one token, which would see each other; or unless `supports_decoding`.
        """
        self._check_operands(q_t, k_t, v_t, None, causal=True)
        if q_t.shape[2] != 1:
            raise ArgumentError(f"a step takes one token, got {q_t.shape[2]}; absorb a prompt and read from it instead")
        return self._step(q_t, k_t, v_t, state)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """`step` after its checks."""
        state = self.absorb(state, k_t, v_t)
        return self.read(state, q_t), state

    def _known_parts(self) -> Parts:
        if self.parts is None:
            raise ArgumentError("a sequence in parts needs to know them: klformer.distributed.sequence_parallel(...)")
        return self.parts

    def _check_operands(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool) -> None:
        if causal and not self.supports_causal:
            raise ArgumentError(f"{type(self).__name__} has no causal form")
        check_operands(
            q,
            k,
            v,
            key_mask=key_mask,
            causal=causal,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
        )
        if not self.supports_cross and q.shape[2] != k.shape[2]:
            raise ArgumentError(
                f"{type(self).__name__} can't attend to another sequence: {q.shape[2]} queries, {k.shape[2]} keys"
            )
        if self.max_len is not None and max(q.shape[2], k.shape[2]) > self.max_len:
            raise ArgumentError(
                f"sequence of {max(q.shape[2], k.shape[2])} tokens is longer than max_len={self.max_len}"
            )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, value_dim={self.value_dim}"
