"""Transformers around any attention."""

from klformer.models.classifiers import PairClassifier, SequenceClassifier
from klformer.models.embeddings import SequenceEmbedding
from klformer.models.heads import ClassifierHead, PairClassifierHead
from klformer.models.transformer import TransformerDecoder, TransformerEncoder

__all__ = [
    "ClassifierHead",
    "PairClassifier",
    "PairClassifierHead",
    "SequenceClassifier",
    "SequenceEmbedding",
    "TransformerDecoder",
    "TransformerEncoder",
]
