"""From a configuration to a model."""

from torch import nn

from klformer.models import (
    ClassifierHead,
    PairClassifier,
    PairClassifierHead,
    SequenceClassifier,
    SequenceEmbedding,
    TransformerEncoder,
)
from klformer.runs.config import ExperimentConfig
from klformer.tasks import Task


def build_model(config: ExperimentConfig, task: Task) -> nn.Module:
    """The model of a run, with fresh weights from torch's global random state."""
    sizes = config.model
    embedding = SequenceEmbedding(
        model_dim=sizes.model_dim,
        max_len=task.max_len,
        vocab_size=task.vocab_size,
        input_dim=task.input_dim,
        positions=sizes.positions,
        dropout=sizes.dropout,
    )
    encoder = TransformerEncoder(
        model_dim=sizes.model_dim,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        ffn_dim=sizes.ffn_dim,
        attention=config.attention.name,
        options=config.attention.options,
        max_len=task.max_len + 1,
        dropout=sizes.dropout,
        activation=sizes.activation,
        checkpoint_layers=sizes.checkpoint_layers,
    )
    shape = {
        "model_dim": sizes.model_dim,
        "hidden_dim": sizes.head_hidden_dim,
        "num_classes": task.objective().num_outputs,
    }
    if task.is_pair:
        return PairClassifier(embedding, encoder, PairClassifierHead(**shape, pair_features=sizes.pair_features))
    return SequenceClassifier(embedding, encoder, ClassifierHead(**shape))
