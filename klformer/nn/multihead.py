"""`torch.nn.MultiheadAttention` with another attention inside: the same arguments, the same weights, the same result
for "softmax".

Masks are torch's here, and nowhere else in klformer: True = drop.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from klformer.attention import AttentionSpec
from klformer.errors import ArgumentError

#: Arguments of torch that change the scores or keep all of them, with what they must be.
UNSUPPORTED = {"add_bias_kv": False, "add_zero_attn": False, "kdim": None, "vdim": None}


class MultiheadAttention(nn.Module):
    """A drop-in for `torch.nn.MultiheadAttention`: `out, _ = mha(q, k, v, need_weights=False)`.

    Parameters have torch's names and shapes, so that `load_state_dict` takes those of torch's class with
    `strict=False`: only the kernel's own are missing there. `from_torch` does that.

    Args:
        embed_dim: Size of a token.
        num_heads: Heads.
        dropout: Of attention weights, which a linear attention never has: must be 0. `from_torch` leaves it out.
        bias: Whether the projections have a bias.
        add_bias_kv: Must be False.
        add_zero_attn: Must be False.
        kdim: Must be None or embed_dim.
        vdim: Must be None or embed_dim.
        batch_first: Whether tensors are (batch, length, size) and not torch's usual (length, batch, size).
        device: Where the parameters are.
        dtype: Of the parameters.
        attention: The attention and its options, like "gmm-rks:num_frequencies=64"; see `klformer.attention_names()`.
        max_len: Longest sequence; only some attentions need it.

    Raises:
        ArgumentError: something is asked for that a linear attention does not have.

    Examples:
        >>> import torch, klformer.nn
        >>> mha = klformer.nn.MultiheadAttention(32, 4, batch_first=True, attention="gmm-prf")
        >>> x = torch.randn(2, 100, 32)
        >>> out, weights = mha(x, x, x, key_padding_mask=torch.zeros(2, 100, dtype=torch.bool), need_weights=False)
        >>> out.shape, weights
        (torch.Size([2, 100, 32]), None)
    """

    #: Torch's encoder layers would otherwise compute softmax from the weights by themselves, in evaluation mode.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str | AttentionSpec = "gmm-rks",
        max_len: int | None = None,
    ) -> None:
        super().__init__()
        given = {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, "kdim": kdim, "vdim": vdim}
        for name, value in given.items():
            if value not in (UNSUPPORTED[name], embed_dim if name in ("kdim", "vdim") else None):
                raise ArgumentError(f"{name} must be {UNSUPPORTED[name]} here, got {value!r}")
        if dropout:
            raise ArgumentError(f"dropout is of attention weights, which are never made: it must be 0, got {dropout}")
        if embed_dim % num_heads:
            raise ArgumentError(f"embed_dim must be a multiple of num_heads={num_heads}, got {embed_dim}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.mechanism = AttentionSpec.of(attention).build(num_heads=num_heads, head_dim=self.head_dim, max_len=max_len)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        self.to(device=device, dtype=dtype)

    @staticmethod
    def from_torch(
        module: nn.MultiheadAttention, *, attention: str | AttentionSpec = "gmm-rks", max_len: int | None = None
    ) -> "MultiheadAttention":
        """The same projections, copied, around another attention; without dropout of weights, which are never made.

        Args:
            module: Torch's; it is left as it is.
            attention: The attention and its options, like "gmm-rks:num_frequencies=64".
            max_len: Longest sequence; only some attentions need it.

        Raises:
            ArgumentError: the module has something that has no counterpart here.

        Examples:
            >>> import torch, klformer.nn
            >>> theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
            >>> ours = klformer.nn.MultiheadAttention.from_torch(theirs, attention="softmax")
            >>> x = torch.randn(2, 10, 32)
            >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-5)
            True
        """
        made = MultiheadAttention(
            module.embed_dim,
            module.num_heads,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype,
            attention=attention,
            max_len=max_len,
        )
        missing, unexpected = made.load_state_dict(module.state_dict(), strict=False)
        assert not unexpected, unexpected
        assert all(name.startswith("mechanism.") for name in missing), missing
        return made.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend, as torch's class does.

        Args:
            query: (L, B, E), or (B, L, E) if `batch_first`, or (L, E) without a batch.
            key: As query, of length S.
            value: As key.
            key_padding_mask: (B, S), or (S) without a batch: True = drop, or a number that is added to the score of the
                key, -inf to drop it.
            need_weights: Must be False; torch's default is True.
            attn_mask: Only the causal mask, as `torch.nn.Transformer.generate_square_subsequent_mask` makes it.
            average_attn_weights: Of no effect, as there are no weights.
            is_causal: Query i sees keys 0 .. i. In torch it is a hint that comes with attn_mask; here it is enough.

        Returns:
            The output, in the shape of the query, and None for the weights.

        Raises:
            ArgumentError: something is asked for that a linear attention does not have.
        """
        if need_weights:
            raise ArgumentError("need_weights=True asks for all weights, which are never made; give need_weights=False")
        if key is not query and not self.mechanism.supports_cross:
            raise ArgumentError(f"{type(self.mechanism).__name__} can't attend to another sequence: key must be query")
        causal, length_dim = is_causal or attn_mask is not None, -2 if self.batch_first or query.dim() == 2 else 0
        if attn_mask is not None and not _is_causal_mask(attn_mask, query.shape[length_dim]):
            raise ArgumentError(
                "attn_mask must be the causal mask, or None: no other choice of pairs factorises; is_causal=True"
            )
        single = query.dim() == 2
        tokens = [self._batch(name, x, single) for name, x in (("query", query), ("key", key), ("value", value))]
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            linear(x, weight, bias).reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x, weight, bias in zip(tokens, weights, biases, strict=True)
        )
        masks = (
            {} if key_padding_mask is None else self._masks(key_padding_mask[None] if single else key_padding_mask, k)
        )
        heads = self.mechanism(q, k, v, **masks, causal=causal)
        out = self.out_proj(heads.transpose(1, 2).flatten(-2).to(self.out_proj.weight.dtype))
        return (out[0] if single else out if self.batch_first else out.transpose(0, 1)), None

    def _batch(self, name: str, x: Tensor, single: bool) -> Tensor:
        """(B, L, E), whatever the layout is."""
        if x.dim() != (2 if single else 3) or x.shape[-1] != self.embed_dim:
            shape = ("L", self.embed_dim) if single else ("B", "L") if self.batch_first else ("L", "B")
            wanted = ", ".join(map(str, shape if single else (*shape, self.embed_dim)))
            raise ArgumentError(f"{name} must have the shape ({wanted}), got {tuple(x.shape)}")
        if single:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _masks(self, mask: Tensor, k: Tensor) -> dict[str, Any]:
        """Torch's mask of keys (B, S) as klformer's: True = keep, or log-weights where the attention takes them."""
        shape = (k.shape[0], k.shape[2])
        if mask.shape != shape or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise ArgumentError(
                f"key_padding_mask must have shape {shape}, bool (True = drop) or floating-point (-inf = drop), got "
                f"{mask.dtype} of shape {tuple(mask.shape)}"
            )
        if self.mechanism.supports_key_bias and mask.is_floating_point():
            return {"key_bias": mask[:, None]}
        drops = mask if mask.dtype == torch.bool else mask == -torch.inf
        if bool(mask.masked_fill(drops, 0).any()):
            raise ArgumentError(
                f"key_padding_mask must be 0 or -inf for {type(self.mechanism).__name__}: no other weights"
            )
        return {"key_mask": ~drops}


def _is_causal_mask(mask: Tensor, length: int) -> bool:
    """Whether exactly the keys after a query are dropped."""
    if mask.shape[-2:] != (length, length):
        return False
    drops = mask if mask.dtype == torch.bool else mask == -torch.inf
    later = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    kept_as_they_are = mask.dtype == torch.bool or not bool(mask.masked_fill(drops, 0).any())
    return kept_as_they_are and bool((drops == later).all())
