"""From a configuration and the shape of a task to a whole model."""

from klformer.attention import AttentionSpec
from klformer.models.classifiers import PairClassifier, SequenceClassifier
from klformer.models.config import ModelConfig
from klformer.models.embeddings import SequenceEmbedding
from klformer.models.heads import ClassifierHead, PairClassifierHead
from klformer.models.transformer import TransformerEncoder


def build_classifier(
    config: ModelConfig,
    attention: AttentionSpec | tuple[AttentionSpec, ...],
    *,
    max_len: int,
    num_outputs: int,
    vocab_size: int | None = None,
    input_dim: int | None = None,
    is_pair: bool = False,
    separator: int | None = None,
) -> SequenceClassifier | PairClassifier:
    """A classifier with fresh weights from torch's global random state.

    Args:
        config: Sizes, positions and pooling.
        attention: One for all layers, or one for each.
        max_len: Longest sequence.
        num_outputs: Scores of an example: classes, or 1 for a regression.
        vocab_size: Number of tokens; give this or `input_dim`.
        input_dim: Size of input vectors; give this or `vocab_size`.
        is_pair: An example is a pair of sequences.
        separator: Token between two texts in one sequence; None if there is none.
    """
    # Parts are made in this order: it decides which random numbers each one gets.
    embedding = SequenceEmbedding(
        model_dim=config.model_dim,
        max_len=max_len,
        vocab_size=vocab_size,
        input_dim=input_dim,
        positions=config.positions,
        cls=config.pooling == "cls",
        separator=separator,
        dropout=config.dropout,
    )
    encoder = TransformerEncoder(config.encoder(attention, max_len=max_len))
    if is_pair:
        pair_head = PairClassifierHead(
            model_dim=config.model_dim,
            hidden_dim=config.head_hidden_dim,
            num_outputs=num_outputs,
            pair_features=config.pair_features,
        )
        return PairClassifier(embedding, encoder, pair_head)
    head = ClassifierHead(model_dim=config.model_dim, hidden_dim=config.head_hidden_dim, num_outputs=num_outputs)
    return SequenceClassifier(embedding, encoder, head)
