"""Attention with a kernel of finitely many features: everything that needs no more than the kernel.

A subclass says what the kernel is at present (`present`), and how queries, keys and their weights go into it. States
know the kernel that they were absorbed with: those of another attention, or of another draw of the noise, are refused.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from klformer.attention.base import AttentionMechanism
from klformer.errors import ArgumentError
from klformer.ops.shapes import check_key_bias
from klformer.ops.spectral_product import SpectralKernel, absorb, attend, causal, kept_keys
from klformer.ops.spectral_product.decoding import DecodingState
from klformer.ops.spectral_product.parts import PartProduct
from klformer.ops.spectral_product.state import KernelState


class SpectralAttention(AttentionMechanism):
    """Attention with a kernel of finitely many features, linear in the length.

    Examples:
        >>> import torch, klformer
        >>> attention = klformer.build_attention("gmm-prf", num_heads=2, head_dim=8)
        >>> present = attention.present()
        >>> present.feature_map.name, attention.key_bias(present, torch.randn(1, 2, 5, 8), None, None)
        ('prf', None)
        >>> attention.backend
        'auto'
        >>> q = torch.randn(1, 2, 5, 8)
        >>> attention.as_query(q) is q, attention.as_key(q) is q
        (True, True)
    """

    supports_key_bias = True
    supports_parts = True

    @property
    def backend(self) -> str:
        """Who computes the products: "auto", or a name as in `klformer.spectral_product`."""
        return "auto"

    @abstractmethod
    def present(self) -> SpectralKernel:
        """Make the kernel of the present frequencies.

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
            key_bias: Those that are given.

        Returns:
            All of them; None for 0.
        """
        return key_bias

    def as_query(self, q: Tensor) -> Tensor:
        """Make queries what the kernel takes.

        Args:
            q: (B, H, L, D).

        Returns:
            (B, H, L, .)
        """
        return q

    def as_key(self, k: Tensor) -> Tensor:
        """Make keys what the kernel takes.

        Args:
            k: (B, H, S, D).

        Returns:
            (B, H, S, .)
        """
        return k

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
        operands, who = (self.as_query(q), self.as_key(k), v), self.backend
        return attend(present, *operands, key_mask=mask, key_bias=bias, causal=causal, backend=who)[0]

    def begin(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None, causal: bool
    ) -> PartProduct:
        self._check_operands(k, k, v, key_mask, causal)
        parts, present, mask = self._known_parts(), self.present(), kept_keys(key_mask, key_bias)
        bias = self.key_bias(present, k, mask, key_bias)
        k, who = self.as_key(k), self.backend
        return PartProduct(present, k, v, key_mask=mask, key_bias=bias, causal=causal, parts=parts, backend=who)

    def finish(self, begun: PartProduct, q: Tensor) -> Tensor:
        return begun.read(self.as_query(q))

    def kernel_state(
        self, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, key_bias: Tensor | None = None
    ) -> KernelState:
        """Return the state of keys and values with the present frequencies.

        It can be read from, merged and written to a file; the kernel's envelope is in it. Gradients flow through it.

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

    def initial_state(self, batch_size: int) -> KernelState:
        present = self.present().copy()
        like = self.as_key(self._anchor.new_empty(1, 1, 0, self.head_dim))
        sizes = {"batch_size": batch_size, "num_heads": self.num_heads, "value_dim": self.value_dim}
        return self._of_here(KernelState.empty(present, like=like, **sizes))

    def prepare_decoding(self, batch_size: int) -> KernelState:
        return self._of_here(DecodingState(self.initial_state(batch_size)))

    def absorb(
        self,
        state: KernelState,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> KernelState:
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
        self._check_state(state)
        bias = self.key_bias(state.kernel, k, kept_keys(key_mask, key_bias), key_bias)
        return self._of_here(state.absorb(self.as_key(k), v, key_mask=key_mask, key_bias=bias, backend=self.backend))

    def read(self, state: KernelState, q: Tensor) -> Tensor:
        self._check_heads("q", q)
        self._check_state(state)
        return state.read(self.as_query(q), backend=self.backend)

    def merge(self, first: KernelState, second: KernelState) -> KernelState:
        self._check_state(first)
        return self._of_here(KernelState.merge(first, second))

    def extend(
        self, state: KernelState, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, KernelState]:
        self._check_operands(q, k, v, key_mask, causal=True)
        self._check_state(state)
        bias = self.key_bias(state.kernel, k, kept_keys(key_mask, None), None)
        operands, who = (self.as_query(q), self.as_key(k), v), self.backend
        out, _, after = causal(state.kernel, *operands, state=state, key_mask=key_mask, key_bias=bias, backend=who)
        return out, self._of_here(DecodingState(after) if isinstance(state, DecodingState) else after)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        self._check_state(state)
        if not isinstance(state, DecodingState):
            if torch.is_grad_enabled():
                return self.extend(state, q_t, k_t, v_t)
            out, own = self._step(q_t, k_t, v_t, self._of_here(DecodingState(state)))
            return out, self._of_here(KernelState(state.kernel, own.sums))
        bias = self.key_bias(state.kernel, k_t, None, None)
        return state.step(self.as_query(q_t), self.as_key(k_t), v_t, bias, backend=self.backend), state

    def _of_here(self, state: KernelState) -> KernelState:
        """Return a state, and remember that it is of this attention as it is now."""
        state.made_by = self._stamp()
        return state

    def _check_state(self, state: KernelState) -> None:
        """Raise ArgumentError unless a state is of this attention and of the present draw."""
        stamp = self._stamp()
        if state.made_by != stamp and not torch.compiler.is_compiling():
            if not state.kernel.same_as(self.present()):
                raise ArgumentError(
                    "the state is of another attention, or of another draw of its noise, or of parameters that have "
                    "changed since: absorb again"
                )
            state.made_by = stamp

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
