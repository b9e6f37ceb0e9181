"""What a converted model keeps in `generate`: of each layer a state of its kernel and the last w + 1 keys, in place of
all keys and values. It takes the same memory and a step the same time, whatever has been read.

transformers hands new keys to its cache, and what that returns to attention. This one returns the new keys alone, and
marks them with the layer that has the state of the earlier ones.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from klformer.attention import AttentionMechanism
from klformer.attention.spectral import NearState, SpectralAttention
from klformer.conversion.hf.interface import LAYER, NAME, InterfaceCall
from klformer.errors import ArgumentError
from klformer.ops.spectral_product.decoding import DecodingState
from klformer.ops.spectral_product.operands import Sums
from klformer.ops.spectral_product.state import KernelState


class KernelCache(Cache):
    """The cache of a converted causal model, which `generate` makes by itself.

    Args:
        model: The model. Its layers that stay softmax keep all their keys and values.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layers: list[Any] = [DynamicLayer() for _ in range(model.config.num_hidden_layers)]  # type: ignore[no-untyped-call]
        module: Any
        for module in model.modules():
            if isinstance(getattr(module, NAME, None), SpectralAttention) and hasattr(module, "layer_idx"):
                layers[module.layer_idx] = KernelLayer()
        super().__init__(layers=layers)

    @property
    def num_bytes(self) -> int:
        """What converted layers keep, without their kernels."""
        return sum(layer.num_bytes for layer in self.layers if isinstance(layer, KernelLayer))


class KernelLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The state of one layer; it is that of its attention, which alone knows what it holds."""

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state: Any = None
        self._length = 0
        self._is_handed_over = False

    @property
    def num_bytes(self) -> int:
        return 0 if self._state is None else int(self._state.num_bytes)

    def attend(self, mechanism: AttentionMechanism, call: InterfaceCall) -> Tensor:
        """Return what queries get from new keys and all earlier ones, (B, H, L, E), and keep the new ones."""
        tokens, self._is_handed_over = call.plain(whole=True), False
        q, k, v, mask = tokens.q, tokens.k, tokens.v, tokens.key_mask
        mask = None if mask is None or bool(mask[:, -k.shape[2] :].all()) else mask[:, -k.shape[2] :]
        if self._state is None:
            begin = mechanism.initial_state if torch.is_grad_enabled() else mechanism.prepare_decoding
            self._state = begin(k.shape[0])
        if k.shape[2] == 1 and mask is None:
            out, self._state = mechanism.step(q, k, v, self._state)
        else:
            out, self._state = mechanism.extend(self._state, q, k, v, key_mask=mask)
        return out

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self._is_handed_over:
            raise ArgumentError(
                "this model changes keys between its cache and its attention: generate with DynamicCache"
            )
        self._is_handed_over = self.is_initialized = True
        self._length += key_states.shape[-2]
        setattr(key_states, LAYER, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._state = None if self._state is None else _chosen(self._state, beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._state is not None:
            rows = torch.arange(_far(self._state).batch_size).repeat_interleave(repeats)
            self._state = _chosen(self._state, rows)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ArgumentError("a converted model can't take tokens back, which are summed up: no assisted generation")

    def activate_past_recording(self) -> None:
        self.crop(1)

    def offload(self) -> None:
        raise ArgumentError(REFUSED.format("offloaded"))


#: Of `generate`, with the cache that was asked for.
REFUSED = (
    "a converted model keeps a state of fixed size in each layer, and no keys: it can't use a cache that is {}; leave "
    "cache_implementation out"
)


def cache_for_generation(model: PreTrainedModel, wanted: str | None, given: Cache | None) -> Cache | None:
    """Return the cache to generate with; None if it is transformers' to make.

    Raises:
        ArgumentError: it is one that a converted model can't use.
    """
    if getattr(given, "offloading", False):
        raise ArgumentError(REFUSED.format("offloaded"))
    if wanted not in (None, "dynamic"):
        raise ArgumentError(REFUSED.format(wanted))
    return KernelCache(model) if given is None and wanted is None else None


def _far(state: KernelState | NearState) -> KernelState:
    return state.far if isinstance(state, NearState) else state


def _chosen(state: Any, rows: Tensor) -> Any:
    """The states of some sequences, in another order and maybe more than once."""
    far = _far(state)
    rows = rows.to(far.sums.values.device)
    own = KernelState(far.kernel, Sums(*(x.index_select(0, rows) for x in far.sums)))
    own = DecodingState(own) if isinstance(far, DecodingState) else own
    own.made_by = far.made_by
    if not isinstance(state, NearState):
        return own
    near = {name: getattr(state, name).index_select(0, rows) for name in ("k", "v", "key_bias")}
    return replace(state, far=own, **near)
