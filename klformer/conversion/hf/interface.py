"""The attention that transformers calls in a converted model, and the mask that it makes for it.

A layer that was converted has its kernel as a submodule called `klformer`, so that its parameters are saved, moved and
trained with the model's own. Layers without one do what they did before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from klformer.attention import AttentionMechanism, AttentionSizes
from klformer.conversion.hosts import Call
from klformer.errors import ArgumentError
from klformer.ops.softmax_attention import visible_keys

#: The name of the attention in a config, of a layer's kernel, and of the section in a saved config.
NAME = "klformer"
#: The attribute of a layer with the function that its calls are handed to instead, as long as somebody watches.
RECEIVER = "_klformer_receiver"
#: The attribute of keys with the layer of a cache that holds what came before them.
LAYER = "_klformer_layer"
#: What some models give their attention that a kernel of queries and keys can't express.
OBSTACLES = {
    "position_bias": "adds a bias of pairs of positions to its scores",
    "sliding_window": "sees a sliding window only",
    "softcap": "caps its scores (softcap)",
    "s_aux": "has attention sinks",
    "head_mask": "masks heads",
    "encoder_hidden_states": "attends to another sequence",
}


@dataclass(frozen=True)
class InterfaceCall:
    """A call of the attention interface as transformers makes it."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    attention_mask: Tensor | None
    scaling: float
    dropout: float
    causal: bool
    extras: dict[str, Any]

    def sizes(self) -> AttentionSizes:
        return AttentionSizes(self.query.shape[1], self.query.shape[3], self.value.shape[3])

    def obstacle(self) -> str | None:
        """Why this attention is not a kernel of queries and keys; None if it is."""
        for name, words in OBSTACLES.items():
            if self.extras.get(name) is not None:
                return words
        if self.attention_mask is not None and self.attention_mask.dim() != 2:
            return "has a mask of pairs of positions"
        return None

    def plain(self, *, whole: bool = False) -> Call:
        """Return the same with one head of keys for each head of queries, scaled as klformer does it, and all queries
        that a causal call leaves out because they were asked before.

        Args:
            whole: Also where it is the last query alone: for attention that has to know where a query stands.
        """
        q, k, v = self.query, self.key, self.value
        if (repeats := q.shape[1] // k.shape[1]) > 1:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        if (factor := self.scaling * q.shape[-1] ** 0.5) != 1.0:
            q = q * factor
        causal = self.causal and (q.shape[2] > 1 or whole)
        if causal and (missing := k.shape[2] - q.shape[2]):
            q = pad(q, (0, 0, missing, 0))
        return Call(q, k, v, self.attention_mask, causal)

    def unchanged(self) -> tuple[Tensor, None]:
        """What transformers' own attention gives, (B, L, H, E)."""
        mask, causal = self.attention_mask, self.causal and self.query.shape[2] > 1
        if (mask is not None and mask.dim() == 2) or (causal and self.query.shape[2] != self.key.shape[2]):
            mask = visible_keys(mask, self.key, self.key, causal=causal)
            assert mask is not None
            mask, causal = mask[:, :, -self.query.shape[2] :] if causal else mask, False
        return sdpa_attention_forward(
            self.module,
            self.query,
            self.key,
            self.value,
            mask,
            dropout=self.dropout,
            scaling=self.scaling,
            is_causal=causal,
            **self.extras,
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """The attention of a converted model, as transformers calls it: (B, H, L, D) in, (B, L, H, E) out.

    Raises:
        ArgumentError: it is asked for what linear attention does not have.
    """
    if extras.get("output_attentions"):
        raise ArgumentError("a converted model makes no attention maps: output_attentions must be False")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    call = InterfaceCall(module, query, key, value, attention_mask, scaling, dropout, causal, extras)
    receiver = getattr(module, RECEIVER, None)
    if receiver is not None:
        heads = receiver(module, call)
    elif (mechanism := getattr(module, NAME, None)) is None:
        return call.unchanged()
    else:
        heads = _converted(call, mechanism)
    return heads[:, :, -query.shape[2] :].transpose(1, 2).contiguous(), None


def _converted(call: InterfaceCall, mechanism: AttentionMechanism) -> Tensor:
    if obstacle := call.obstacle():
        raise ArgumentError(f"a converted layer is asked for what its kernel can't do: it {obstacle}")
    if call.dropout:
        raise ArgumentError(
            f"a converted layer has no weights to drop: the dropout of attention must be 0, got {call.dropout}"
        )
    if (layer := getattr(call.key, LAYER, None)) is not None:
        return layer.attend(mechanism, call).to(call.query.dtype)
    return call.plain(whole=not mechanism.supports_cross).attend(mechanism).to(call.query.dtype)


def key_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """Which keys are tokens, (B, S), where attention is plain; otherwise transformers' own mask of all pairs.

    Raises:
        ArgumentError: the cache has room for keys that are not there yet, which would be taken for keys.
    """
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            mask_function=mask_function,
            attention_mask=attention_mask,
            **others,
        )
    # Caches of fixed size count their tokens in a tensor; in the others the queries are the last of the keys.
    is_fixed = isinstance(q_offset, Tensor) or q_offset + q_length != kv_length
    if mask_function is causal_mask_function and is_fixed:
        raise ArgumentError(
            "a converted model decodes with a cache that grows, like DynamicCache, not with a static one"
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:].bool()
    if not torch.compiler.is_compiling() and mask.shape[1] == kv_length and bool(mask.all()):
        return None
    return mask


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, key_mask)
