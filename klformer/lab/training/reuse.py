"""Passes through one model with the same inputs and other noise: what the noise has no part in is computed once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from klformer.models.classifiers import PairClassifier, PositionClassifier, SequenceClassifier
from klformer.models.masked import MaskedLanguageModel
from klformer.models.transformer import TransformerLayer


@contextmanager
def first_part_once(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Inside, embedding and first projections of a classifier keep their results from one pass to the next.

    For evaluation without gradients. Call what is given before every pass after the first; the inputs must be the same.
    Any other model is left alone.
    """
    remembered = [_Remembered(module) for module in _before_noise(model)]

    def next_pass() -> None:
        for module in remembered:
            module.calls = 0

    try:
        yield next_pass
    finally:
        for module in remembered:
            module.restore()


def _before_noise(model: nn.Module) -> list[nn.Module]:
    if not isinstance(model, SequenceClassifier | PairClassifier | PositionClassifier | MaskedLanguageModel):
        return []
    layer = model.encoder.layers[0]
    assert isinstance(layer, TransformerLayer)
    attention = layer.self_attention
    modules = (model.embedding, layer.self_norm, attention.query, attention.key, attention.value)
    return [module for module in modules if module is not None]


class _Remembered:
    """A module whose n-th call of a pass gives what the n-th call of the first pass gave."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.results: list[Any] = []
        self.calls = 0
        self._compute = module.forward
        module.forward = self._forward

    def _forward(self, *arguments: Any, **named: Any) -> Any:
        if self.calls == len(self.results):
            self.results.append(self._compute(*arguments, **named))
        self.calls += 1
        return self.results[self.calls - 1]

    def restore(self) -> None:
        del self.module.forward  # what the class has comes back
