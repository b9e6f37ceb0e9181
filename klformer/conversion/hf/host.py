"""Models of transformers as hosts, through its attention interface."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from klformer.attention import AttentionMechanism
from klformer.conversion.hf.classes import convert_class, switch_off_dropout
from klformer.conversion.hf.interface import NAME, RECEIVER, InterfaceCall
from klformer.conversion.hf.positions import extend_positions, place_tokens, takes_places
from klformer.conversion.hosts import Answer, Batch, ConversionError, Extension, Host, Site, Watcher
from klformer.conversion.record import SiteRecord


class TransformersHost(Host):
    """A model of transformers. A batch has what its tokenizer gives, and maybe labels.

    Raises:
        ConversionError: the kind of the model is not one that can be converted.
    """

    model: PreTrainedModel

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, PreTrainedModel)
        super().__init__(model)
        config, kind = model.config, type(model).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise ConversionError(f"{kind} is an encoder with a decoder: convert its encoder alone (get_encoder())")
        if getattr(config, "output_attentions", False):
            raise ConversionError(
                f"{kind} is to give its attention maps, which linear attention never makes: set "
                "model.config.output_attentions = False"
            )
        if any(hasattr(module, NAME) for module in model.modules()):
            raise ConversionError(f"this {kind} is converted already: give the softmax model that it was made of")

    def run(self, batch: Batch, *, hidden: bool = False) -> Answer:
        inputs: dict[str, Any] = {name: value for name, value in batch.items() if name != "labels"}
        if getattr(self.model.config, "use_cache", False):
            inputs["use_cache"] = False
        if hidden:
            inputs["output_hidden_states"] = True
        if takes_places(base := self.model.base_model):  # for the teacher too
            inputs = place_tokens(base, (), inputs)[1]
        answer = self.model(**inputs)
        # The first ones are the embeddings, which no attention has seen.
        layers = tuple(answer.hidden_states[1:]) if hidden else ()
        if "logits" in answer:
            return Answer(answer.logits, are_scores=True, hidden=layers)
        return Answer(answer.last_hidden_state, are_scores=False, hidden=layers)

    def sites(self, batch: Batch) -> list[Site]:
        names = {module: name for name, module in self.model.named_modules()}
        found: dict[str, Site] = {}

        def probe(module: nn.Module, call: InterfaceCall) -> Tensor:
            name = names[module]
            found.setdefault(name, Site(name, call.sizes(), call.causal, call.obstacle()))
            # What goes on from here is of no interest.
            return call.query.new_zeros(*call.query.shape[:3], call.value.shape[3])

        with self._handing_over(probe), torch.no_grad():
            self.run({name: value[:2] for name, value in batch.items()})
        if not found:
            raise ConversionError(
                f"{type(self.model).__name__} does not call the attention interface of transformers: its attention "
                "can't be replaced from outside. Models like BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT, ESM, "
                "ViT, GPT-2 and Llama do"
            )
        return list(found.values())

    @contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        names = {module: name for name, module in self.model.named_modules()}

        def hand_over(module: nn.Module, call: InterfaceCall) -> Tensor:
            if call.obstacle() is not None:
                return call.unchanged()[0].transpose(1, 2)
            return watcher(names[module], call.plain())

        with self._handing_over(hand_over):
            yield

    def install(self, mechanisms: Mapping[str, AttentionMechanism]) -> None:
        for name, mechanism in mechanisms.items():
            self.model.get_submodule(name).add_module(NAME, mechanism)
        switch_off_dropout(self.model)
        self.model.set_attn_implementation(NAME)

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            delattr(self.model.get_submodule(name), NAME)

    def finish(self, records: Mapping[str, SiteRecord]) -> None:
        convert_class(self.model, records)

    def extend_positions(self, max_positions: int, extension: Extension) -> None:
        extend_positions(self.model, max_positions, extension)

    def mask(self, batch: Batch) -> Tensor | None:
        mask = batch.get("attention_mask")
        return None if mask is None else mask.bool()

    @contextmanager
    def _handing_over(self, receiver: Callable[[nn.Module, InterfaceCall], Tensor]) -> Iterator[None]:
        """As long as it lasts, the attention of all layers is what the receiver says, (B, H, L, E)."""
        before = self.model.config._attn_implementation
        modules = list(self.model.modules())
        try:
            self.model.set_attn_implementation(NAME)
            for module in modules:
                module.__dict__[RECEIVER] = receiver
            yield
        finally:
            for module in modules:
                module.__dict__.pop(RECEIVER, None)
            self.model.set_attn_implementation(before)
