"""Models whose attention can be watched and replaced: what the steps of a conversion know of a model, and no more.

A host hides where a model comes from. It names the places where attention is called (sites), hands every call to
whoever watches, and puts other attentions in their place. `own.py` has the host of klformer's models, `hf.py` that of
transformers' models.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import pad

from klformer.attention import AttentionMechanism, AttentionSizes
from klformer.conversion.record import SiteRecord
from klformer.errors import ArgumentError, UserError
from klformer.ops import softmax_attention

#: How position embeddings are made more: the same again, or drawn out.
Extension = Literal["repeat", "interpolate"]
#: What a model is called with: tensors by the name of the argument.
Batch = Mapping[str, Tensor]


class ConversionError(UserError):
    """A model that can't be converted; the message says why, and what would be right.

    Examples:
        >>> import torch, klformer
        >>> from klformer.conversion import ConversionError
        >>> encoder = klformer.TransformerEncoder(klformer.EncoderConfig(attention="gmm-prf"))
        >>> try:
        ...     klformer.convert(encoder, [torch.randn(4, 16, 64) for _ in range(3)])
        ... except ConversionError as error:
        ...     print(str(error).partition(":")[0])
        TransformerEncoder has no attention to convert
    """


@dataclass(frozen=True)
class Call:
    """One call of an attention. Queries are scaled so that the softmax that was called has the temperature 1 / sqrt D.

    Heads of keys and values are as many as those of queries.
    """

    q: Tensor  # (B, H, L, D)
    k: Tensor  # (B, H, S, D)
    v: Tensor  # (B, H, S, E)
    key_mask: Tensor | None  # (B, S), True = keep
    causal: bool

    def softmax(self) -> Tensor:
        """What softmax attention gives, (B, H, L, E)."""
        k, v = (softmax_attention.hide(x, self.key_mask) for x in (self.k, self.v))
        if self.key_mask is None:
            return softmax_attention.attend(self.q, k, v, causal=self.causal)
        visible = softmax_attention.visible_keys(self.key_mask, self.q, k, causal=self.causal)
        return softmax_attention.attend(self.q, k, v, visible)

    def attend(self, mechanism: AttentionMechanism) -> Tensor:
        """What another attention gives, (B, H, L, E). Where queries are fewer than keys, they are the first tokens."""
        length, given = self.q.shape[2], {"key_mask": self.key_mask, "causal": self.causal}
        if mechanism.supports_cross or length >= self.k.shape[2]:
            return mechanism(self.q, self.k, self.v, **given)
        return mechanism(pad(self.q, (0, 0, 0, self.k.shape[2] - length)), self.k, self.v, **given)[:, :, :length]

    def query_mask(self) -> Tensor | None:
        """Which queries are tokens, (B, L); None if all are. For attention of a sequence to itself."""
        return self.key_mask if self.q.shape[2] == self.k.shape[2] else None


#: Given a site's name and a call, says what the attention gives, (B, H, L, E).
Watcher = Callable[[str, Call], Tensor]


@dataclass(frozen=True)
class Site:
    """A place in a model where attention is called."""

    name: str
    """Path of the module in the model."""

    sizes: AttentionSizes
    causal: bool

    obstacle: str | None = None
    """Why the attention here can't be replaced; None if it can."""

    cross: bool = False
    """Keys are of another sequence, which has no neighbours of a query."""


@dataclass(frozen=True)
class Answer:
    """What a model gives."""

    values: Tensor  # (B, C) or (B, L, C)
    are_scores: bool
    """Whether the largest of C is the prediction; otherwise they are hidden states."""
    hidden: tuple[Tensor, ...] = ()
    """What the layers gave, (B, L, model_dim) each, if that was asked for."""


class Host(ABC):
    """A model, and the ways to its attention.

    Args:
        model: The model; the host may change it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def run(self, batch: Batch, *, hidden: bool = False) -> "Answer":
        """The model's answer to a batch, with what its layers gave if you like."""

    @abstractmethod
    def sites(self, batch: Batch) -> list[Site]:
        """Where attention is called, in the order of the calls, seen by running a batch.

        Raises:
            ConversionError: the model does not call its attention in a way that can be watched.
        """

    @abstractmethod
    def watching(self, watcher: Watcher) -> AbstractContextManager[None]:
        """As long as it lasts, all calls of attention go to the watcher."""

    @abstractmethod
    def install(self, mechanisms: Mapping[str, AttentionMechanism]) -> None:
        """Put attentions in the place of softmax, by the names of the sites; they become parts of the model."""

    @abstractmethod
    def remove(self, names: Collection[str]) -> None:
        """Put softmax back at some sites."""

    def finish(self, records: Mapping[str, SiteRecord]) -> None:  # noqa: B027 (most models need nothing)
        """Make the model one that can be saved by its own library, with these attentions."""

    def extend_positions(self, max_positions: int, extension: Extension) -> None:
        """Make the model read longer sequences.

        Raises:
            ConversionError: it has no positions that could be extended.
        """
        raise ConversionError(f"max_positions must be None for {type(self.model).__name__}, a model of klformer")

    @abstractmethod
    def mask(self, batch: Batch) -> Tensor | None:
        """Which positions of a batch are tokens, (B, L), True = keep; None if all are."""

    def labels(self, batch: Batch) -> Tensor | None:
        """What is right, (B,) or (B, L) with -100 where nothing is asked; None if the batch does not say."""
        return batch.get("labels")


def chosen_sites(sites: list[Site], layers: tuple[int, ...] | None) -> list[Site]:
    """The sites to convert: all of them, or those at the positions that are named.

    Raises:
        ArgumentError: there is no such layer.
        ConversionError: one can't be replaced; the message says which ones could.
    """
    wanted = tuple(range(len(sites))) if layers is None else layers
    for layer in wanted:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(sites):
            raise ArgumentError(f"layers must be numbers from 0 to {len(sites) - 1}, got {layer!r}")
    if not wanted:
        raise ArgumentError("layers must name at least one layer, got none")
    if obstacles := [f"layer {layer} {sites[layer].obstacle}" for layer in wanted if sites[layer].obstacle]:
        others = [index for index, site in enumerate(sites) if site.obstacle is None]
        advice = f"; layers={tuple(others)} would leave such layers out" if others else ""
        raise ConversionError(f"this attention can't be replaced: {obstacles[0]}{advice}")
    return [sites[layer] for layer in sorted(set(wanted))]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards each of its modules as before."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model comes from transformers; it is not imported for that."""
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
