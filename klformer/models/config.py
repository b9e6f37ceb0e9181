"""What describes a model: sizes, attention, positions and pooling, as frozen values with JSON in and out."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from klformer.attention import AttentionSpec
from klformer.config import Config
from klformer.errors import ArgumentError


class StackConfig(Config):
    """What every stack of Transformer layers has, whatever its attention."""

    num_layers: int = Field(2, ge=1)
    """Blocks of the encoder."""

    num_heads: int = Field(4, ge=1)
    """Heads H."""

    model_dim: int = Field(64, ge=1)
    """Size of a token."""

    ffn_dim: int = Field(128, ge=1)
    """Hidden size of the feed-forward part."""

    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout: after attention, inside and after the feed-forward part."""

    activation: Literal["gelu", "relu"] = "gelu"
    """Activation of the feed-forward part."""

    checkpoint_layers: bool = False
    """Compute the inside of layers again in backward: less memory, a third more time; in training only."""


class EncoderConfig(StackConfig):
    """An encoder or a decoder.

    The attention may be given as text, like "gmm-rks:num_frequencies=64", or as a list of texts, one for each layer.

    Raises:
        ValueError: a size is not allowed, or there are not as many attentions as layers.

    Examples:
        >>> import klformer
        >>> config = klformer.EncoderConfig(num_layers=2, attention=["softmax", "gmm-prf:num_frequencies=64"])
        >>> [spec.name for spec in config.attention_of_layers()]
        ['softmax', 'gmm-prf']
        >>> klformer.EncoderConfig.model_validate_json(config.model_dump_json()) == config
        True
    """

    head_dim: int | None = Field(None, ge=1)
    """Size D of queries and keys; model_dim / num_heads if None."""

    value_dim: int | None = Field(None, ge=1)
    """Size E of values; D if None."""

    max_len: int | None = Field(None, ge=1)
    """Longest sequence; only some attentions need it."""

    rotary: bool = False
    """Rotate queries and keys of self-attention by their position; then nothing need be added to the inputs."""

    attention: AttentionSpec | tuple[AttentionSpec, ...] = AttentionSpec(name="gmm-rks")
    """The attention of all layers, or one for each layer."""

    @field_validator("attention", mode="before")
    @classmethod
    def _read_attention(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(AttentionSpec.of(each) for each in value)
        return AttentionSpec.of(value)

    @model_validator(mode="after")
    def _check_one_for_each_layer(self) -> "EncoderConfig":
        if isinstance(self.attention, tuple) and len(self.attention) != self.num_layers:
            raise ArgumentError(
                f"attention must be one for all layers or one for each of num_layers={self.num_layers}, "
                f"got {len(self.attention)}"
            )
        return self

    def attention_of_layers(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer, from the first to the last."""
        return self.attention if isinstance(self.attention, tuple) else (self.attention,) * self.num_layers


class ModelConfig(StackConfig):
    """Sizes of the Transformer.

    Raises:
        ValueError: a size is not allowed.

    Examples:
        >>> from klformer import AttentionSpec
        >>> from klformer.models import ModelConfig
        >>> config = ModelConfig(num_layers=3, model_dim=32, positions="rotary")
        >>> encoder = config.encoder(AttentionSpec(name="gmm-prf"), max_len=100)
        >>> encoder.num_layers, encoder.rotary, encoder.max_len  # 100 tokens and CLS
        (3, True, 101)
    """

    head_dim: int = Field(16, ge=1)
    """Size of queries, keys and values of a head."""

    head_hidden_dim: int = Field(128, ge=2)
    """Hidden size of the classifier."""

    head_activation: Literal["relu", "tanh"] = "relu"
    """Activation of the classifier of a sequence: Long Range Arena's, or that of the paper's GLUE table."""

    pair_features: Literal["concat", "difference"] = "concat"
    """What the classifier of a pair sees: both vectors, or also the absolute value of their difference."""

    positions: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    """Position embedding: added to the inputs, or by rotation of queries and keys in every layer; "none" for inputs
    whose order means nothing."""

    convolution_width: int = Field(0, ge=0)
    """Width, an odd number, of a convolution over neighbours that is added to the inputs; 0 for none. It tells every
    token which ones stand beside it, which linear attention is slow to find."""

    token_start: Literal["independent", "ordered"] = "independent"
    """How the vectors of tokens start: independent of each other, or ordered, with neighbouring numbers alike, for
    tokens that are amounts such as the brightness of a pixel."""

    pooling: Literal["cls", "mean"] = "cls"
    """What the classifier sees of a sequence: the output at a CLS token in front, or the mean over its tokens."""

    def encoder(self, attention: AttentionSpec | tuple[AttentionSpec, ...], *, max_len: int) -> EncoderConfig:
        """The encoder of the model.

        Args:
            attention: One for all layers, or one for each.
            max_len: Longest sequence, without CLS.
        """
        shared = {name: getattr(self, name) for name in StackConfig.model_fields}
        return EncoderConfig(
            **shared,
            head_dim=self.head_dim,
            max_len=max_len + int(self.pooling == "cls"),
            rotary=self.positions == "rotary",
            attention=attention,
        )
