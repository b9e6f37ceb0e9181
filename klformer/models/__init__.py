"""Transformers around any attention, and the configurations that describe them."""

from klformer.attention import AttentionSpec
from klformer.models.build import InputShape, build_classifier, build_masked
from klformer.models.classifiers import PairClassifier, PositionClassifier, SequenceClassifier
from klformer.models.config import EncoderConfig, ModelConfig
from klformer.models.embeddings import SequenceEmbedding
from klformer.models.heads import ClassifierHead, PairClassifierHead
from klformer.models.masked import MaskedLanguageModel
from klformer.models.transformer import TransformerDecoder, TransformerEncoder

__all__ = [
    "AttentionSpec",
    "ClassifierHead",
    "EncoderConfig",
    "InputShape",
    "MaskedLanguageModel",
    "ModelConfig",
    "PairClassifier",
    "PairClassifierHead",
    "PositionClassifier",
    "SequenceClassifier",
    "SequenceEmbedding",
    "TransformerDecoder",
    "TransformerEncoder",
    "build_classifier",
    "build_masked",
]
