"""From a configuration and the shape of a task to a whole model."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from klformer.attention import AttentionSpec
from klformer.errors import ArgumentError
from klformer.models.classifiers import PairClassifier, PositionClassifier, SequenceClassifier
from klformer.models.config import ModelConfig
from klformer.models.embeddings import SequenceEmbedding
from klformer.models.heads import ClassifierHead, PairClassifierHead
from klformer.models.masked import MaskedHead, MaskedLanguageModel, log_frequencies
from klformer.models.transformer import TransformerDecoder, TransformerEncoder


@dataclass(frozen=True)
class InputShape:
    """The form of sequences: token ids, or vectors.

    Args:
        max_len: Longest sequence.
        vocab_size: Number of token ids; None if positions are vectors.
        input_dim: Size of the vectors; None if positions are token ids.
        is_pair: Examples are pairs of sequences.
        separator: Id between two texts in one sequence: what comes after it is of the second type.
        mask: Id that stands for a hidden token; None if there is none among `vocab_size`.
        specials: Ids that are never hidden and never guessed.

    Examples:
        >>> from klformer.models import InputShape
        >>> texts = InputShape(max_len=512, vocab_size=259)
        >>> texts.max_len, texts.input_dim, texts.is_pair
        (512, None, False)
    """

    max_len: int
    vocab_size: int | None = None
    input_dim: int | None = None
    is_pair: bool = False
    separator: int | None = None
    mask: int | None = None
    specials: tuple[int, ...] = ()


def build_classifier(
    config: ModelConfig,
    attention: AttentionSpec | tuple[AttentionSpec, ...],
    shape: InputShape,
    *,
    num_outputs: int,
    of_positions: bool = False,
    causal: bool = False,
) -> SequenceClassifier | PairClassifier | PositionClassifier:
    """A classifier with fresh weights from torch's global random state.

    Args:
        config: Sizes, positions and pooling.
        attention: One for all layers, or one for each.
        shape: The form of sequences.
        num_outputs: Scores of an example, or a position: classes, or 1 for a regression.
        of_positions: Scores are of every position; there is no pooling then.
        causal: Positions see themselves and the past only; for scores of positions.

    Raises:
        ArgumentError: pairs with scores of positions, or a causal model that reads one vector off a sequence or has a
            convolution over neighbours.

    Examples:
        >>> import torch
        >>> from klformer import AttentionSpec
        >>> from klformer.models import InputShape, ModelConfig, build_classifier
        >>> config = ModelConfig(num_layers=1, model_dim=32, pooling="mean")
        >>> shape = InputShape(max_len=100, vocab_size=257)
        >>> model = build_classifier(config, AttentionSpec(name="gmm-prf"), shape, num_outputs=2)
        >>> model(torch.randint(257, (4, 100))).shape
        torch.Size([4, 2])
    """
    if of_positions and shape.is_pair:
        raise ArgumentError("of_positions must be False for pairs of sequences")
    if causal and not of_positions:
        raise ArgumentError("causal must be False where one vector is read off a sequence")
    if causal and config.convolution_width:
        raise ArgumentError(
            "convolution_width must be 0 in a causal model, which does not see what comes; "
            f"got {config.convolution_width}"
        )
    # Parts are made in this order: it decides which random numbers each one gets.
    embedding = _embedding(config, shape, cls=config.pooling == "cls" and not of_positions)
    layers = config.encoder(attention, max_len=shape.max_len)
    if of_positions:
        stack = TransformerDecoder(layers) if causal else TransformerEncoder(layers)
        return PositionClassifier(embedding, stack, _head(config, num_outputs))
    encoder = TransformerEncoder(layers)
    if shape.is_pair:
        pair_head = PairClassifierHead(
            model_dim=config.model_dim,
            hidden_dim=config.head_hidden_dim,
            num_outputs=num_outputs,
            pair_features=config.pair_features,
        )
        return PairClassifier(embedding, encoder, pair_head)
    return SequenceClassifier(embedding, encoder, _head(config, num_outputs))


def build_masked(
    config: ModelConfig,
    attention: AttentionSpec | tuple[AttentionSpec, ...],
    shape: InputShape,
    *,
    counts: Tensor,
) -> MaskedLanguageModel:
    """A model that guesses hidden tokens; its embedding and its encoder are those of a classifier of one sequence.

    Args:
        config: As `build_classifier`.
        attention: One for all layers, or one for each.
        shape: The form of sequences; of the tokens there are as many as of `counts`.
        counts: (vocab_size,), how often each token is there in training.

    Raises:
        ArgumentError: a size or an option does not fit the attention.

    Examples:
        The model begins with how often each token is there:

        >>> import torch
        >>> from klformer import AttentionSpec
        >>> from klformer.models import InputShape, ModelConfig, build_masked
        >>> counts, shape = torch.tensor([70, 20, 7]), InputShape(max_len=10, vocab_size=3)
        >>> model = build_masked(ModelConfig(), AttentionSpec(name="gmm-prf"), shape, counts=counts)
        >>> model.head.bias.exp()
        tensor([0.7100, 0.2100, 0.0800], grad_fn=<ExpBackward0>)
    """
    embedding = _embedding(config, replace(shape, vocab_size=len(counts)), cls=config.pooling == "cls")
    if config.token_start == "ordered":
        with torch.no_grad():
            embedding.inputs.weight[-1].normal_()  # the mask, which is no amount
    encoder = TransformerEncoder(config.encoder(attention, max_len=shape.max_len))
    head = MaskedHead(model_dim=config.model_dim, log_frequencies=log_frequencies(counts))
    return MaskedLanguageModel(embedding, encoder, head)


def _embedding(config: ModelConfig, shape: InputShape, *, cls: bool) -> SequenceEmbedding:
    return SequenceEmbedding(
        model_dim=config.model_dim,
        max_len=shape.max_len,
        vocab_size=shape.vocab_size,
        input_dim=shape.input_dim,
        positions=config.positions,
        cls=cls,
        separator=shape.separator,
        convolution_width=config.convolution_width,
        token_start=config.token_start,
        dropout=config.dropout,
    )


def _head(config: ModelConfig, num_outputs: int) -> ClassifierHead:
    return ClassifierHead(
        model_dim=config.model_dim,
        hidden_dim=config.head_hidden_dim,
        num_outputs=num_outputs,
        activation=config.head_activation,
    )
