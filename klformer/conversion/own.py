"""klformer's own models as hosts: every `MultiheadAttention` with softmax in them."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from klformer.attention import AttentionMechanism, AttentionSizes, MultiheadAttention
from klformer.attention.softmax import SoftmaxAttention
from klformer.conversion.hosts import Answer, Batch, Call, ConversionError, Host, Site, Watcher
from klformer.models.transformer import TransformerLayer


class OwnHost(Host):
    """A model that is put together of klformer's layers. A batch has the keywords of its `forward`, and maybe labels.

    Raises:
        ConversionError: there is no softmax attention of klformer in it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, MultiheadAttention) and isinstance(layer.mechanism, SoftmaxAttention)
        }
        if not self._layers:
            raise ConversionError(
                f"{type(model).__name__} has no attention to convert: it must be a model of transformers, or have "
                "klformer.MultiheadAttention with attention='softmax' in it"
            )

    def run(self, batch: Batch, *, hidden: bool = False) -> Answer:
        given: list[Tensor] = []
        layers = [each for each in self.model.modules() if isinstance(each, TransformerLayer)] if hidden else []
        hooks = [each.register_forward_hook(lambda _, __, out: given.append(out)) for each in layers]
        try:
            answer = self.model(**{name: value for name, value in batch.items() if name != "labels"})
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(answer, Tensor):
            raise ConversionError(f"{type(self.model).__name__} must give a tensor, got {type(answer).__name__}")
        return Answer(answer, are_scores=hasattr(self.model, "head"), hidden=tuple(given))

    def sites(self, batch: Batch) -> list[Site]:
        remembered: set[MultiheadAttention] = set()

        def note(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            memory = given[1] if len(given) > 1 else named.get("memory")
            if memory is not None and isinstance(layer, MultiheadAttention):
                remembered.add(layer)

        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self._layers.values()]
        try:
            with torch.no_grad():
                self.run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        # A layer of an encoder may attend from its first tokens to all of them.
        own = {each.self_attention for each in self.model.modules() if isinstance(each, TransformerLayer)}
        return [_site(name, layer, cross=layer in remembered - own) for name, layer in self._layers.items()]

    @contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        before = {name: layer.mechanism for name, layer in self._layers.items()}
        try:
            for name, layer in self._layers.items():
                layer.mechanism = _Watched(layer.mechanism, name, watcher)
            yield
        finally:
            for name, layer in self._layers.items():
                layer.mechanism = before[name]

    def install(self, mechanisms: Mapping[str, AttentionMechanism]) -> None:
        for name, mechanism in mechanisms.items():
            self._layers[name].mechanism = mechanism

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            self._layers[name].mechanism = SoftmaxAttention(_sizes(self._layers[name].mechanism))

    def mask(self, batch: Batch) -> Tensor | None:
        return batch.get("key_mask")


class _Watched(AttentionMechanism):
    """Hands its calls to a watcher."""

    def __init__(self, inner: AttentionMechanism, name: str, watcher: Watcher) -> None:
        super().__init__(_sizes(inner))
        self._name = name
        self._watcher = watcher

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
        return self._watcher(self._name, Call(q, k, v, key_mask, causal))


def _site(name: str, layer: MultiheadAttention, *, cross: bool) -> Site:
    return Site(name, _sizes(layer.mechanism), causal=layer.causal, cross=cross)


def _sizes(mechanism: AttentionMechanism) -> AttentionSizes:
    return AttentionSizes(mechanism.num_heads, mechanism.head_dim, mechanism.value_dim, mechanism.max_len)
