"""What describes a model: read from text and JSON, checked when made, and what it says is what is built."""

import json

import pytest
import torch
from pydantic import ValidationError

import klformer
from klformer.attention.registry import ATTENTIONS, register_attention
from klformer.attention.softmax import SoftmaxAttention
from klformer.config import describe_problems
from klformer.errors import ArgumentError
from klformer.models import AttentionSpec, EncoderConfig, ModelConfig, TransformerDecoder, TransformerEncoder


def test_an_attention_may_be_text():
    config = EncoderConfig(attention="gmm-rks:num_frequencies=64")
    assert config.attention == AttentionSpec(name="gmm-rks", options={"num_frequencies": 64})
    assert config == EncoderConfig(attention={"name": "gmm-rks", "options": {"num_frequencies": 64}})


def test_each_layer_may_have_its_own_attention():
    config = EncoderConfig(num_layers=3, attention=["softmax", AttentionSpec(name="gmm-prf"), "local:block_size=4"])
    layers = TransformerEncoder(config).layers
    kinds = [type(layer.self_attention.mechanism).__name__ for layer in layers]
    assert kinds == ["SoftmaxAttention", "KernelizedAttention", "LocalAttention"]
    assert layers[2].self_attention.mechanism.block_size == 4
    with pytest.raises(ValueError, match="'local' can't attend to another sequence"):
        TransformerDecoder(config, cross_attention=True)


@pytest.mark.parametrize(
    "config",
    [
        EncoderConfig(),
        EncoderConfig(attention="generative-rks:hidden_dims=[8,16]", head_dim=3, rotary=True),
        EncoderConfig(num_layers=2, attention=("softmax", "gmm-prf:frozen=true"), max_len=9, dropout=0),
        ModelConfig(pooling="mean", positions="rotary"),
        AttentionSpec.parse("fastfood-prf:lengthscale=1.0"),
    ],
)
def test_json_comes_back(config):
    assert type(config).model_validate_json(config.model_dump_json()) == config
    assert type(config)(**json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize("kind", [EncoderConfig, ModelConfig, AttentionSpec])
def test_every_field_is_explained(kind):
    assert all(field.description for field in kind.model_fields.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_dim": 0}, "model_dim: Input should be greater than or equal to 1, got 0"),
        ({"dropout": 1.0}, "dropout: Input should be less than 1, got 1.0"),
        ({"model_dims": 3}, "model_dims: Extra inputs are not permitted, got 3"),
        ({"head_dim": 0, "num_heads": "x"}, "num_heads: Input should be a valid integer.*; head_dim: Input should be"),
        ({"attention": "gmm-rsk"}, "^attention: unknown attention 'gmm-rsk'; did you mean 'gmm-rks'"),
        ({"attention": ["softmax", "gmm-rks:frosen=1"]}, "gmm-rks has no option 'frosen'; did you mean 'frozen'"),
        ({"attention": 3}, "attention must be text, like .*, or AttentionSpec, got 3"),
        ({"attention": {"name": "softmax", "option": {}}}, "option: Extra inputs are not permitted"),
        (
            {"attention": ["softmax"]},
            "^attention must be one for all layers or one for each of num_layers=2, got 1$",
        ),
    ],
)
def test_bad_values_are_named_in_one_line(arguments, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        EncoderConfig(**arguments)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_what_is_validated_from_data_says_where_the_problem_is():
    with pytest.raises(ValidationError) as caught:
        EncoderConfig.model_validate({"attention": {"name": "softmx"}, "ffn_dim": 0})
    described = describe_problems(caught.value)
    assert "ffn_dim: Input should be greater than or equal to 1, got 0" in described
    assert "attention: unknown attention 'softmx'; did you mean 'softmax'" in described


@pytest.mark.parametrize("text", ["sofmax", "softmax:rank=3", "softmax:rank"])
def test_parsing_raises_the_error_that_users_see(text):
    with pytest.raises(ArgumentError):
        AttentionSpec.parse(text)


def test_an_unknown_attention_is_answered_with_all_names():
    with pytest.raises(
        ArgumentError, match=f"Known: {', '.join(klformer.attention_names())}; if it comes from a plugin"
    ):
        AttentionSpec.parse("sofmax")


def test_an_attention_without_options_says_so():
    with pytest.raises(ArgumentError, match=r"softmax has no option 'rank'\. Options: none"):
        AttentionSpec(name="softmax", options={"rank": 3})


def test_complete_writes_all_options_out():
    spec = AttentionSpec.parse("gmm-rks:num_frequencies=64").complete()
    assert spec.options | {"backend": "auto"} == klformer.attention_options("gmm-rks") | {"num_frequencies": 64}
    assert AttentionSpec.parse("gmm-rks:backend=plain").complete().options["backend"] == "plain"
    assert "backend" not in AttentionSpec.parse("gmm-rks:backend=plain").model_dump()["options"]
    assert spec.complete() == spec


def test_attentions_that_are_registered_later_are_known(monkeypatch):
    with pytest.raises(ArgumentError, match="unknown attention 'newcomer'"):
        AttentionSpec.parse("newcomer")
    monkeypatch.setattr(ATTENTIONS, "_entries", dict(ATTENTIONS._entries))
    register_attention("newcomer", SoftmaxAttention, "the same by another name")
    encoder = TransformerEncoder(EncoderConfig(attention="newcomer"))
    assert encoder(torch.randn(1, 3, 64)).shape == (1, 3, 64)


def test_a_model_keeps_what_it_was_made_from():
    config = EncoderConfig(attention="softmax", num_layers=1)
    assert TransformerEncoder(config).config is config


def test_head_sizes_follow_from_the_model():
    encoder = TransformerEncoder(EncoderConfig(model_dim=12, num_heads=3, attention="softmax"))
    assert encoder.layers[0].self_attention.head_dim == 4
    with pytest.raises(ValueError, match="model_dim=10 is not a multiple of num_heads=3; give head_dim"):
        TransformerEncoder(EncoderConfig(model_dim=10, num_heads=3))


def test_the_encoder_of_a_model_has_its_sizes():
    model = ModelConfig(num_layers=3, num_heads=2, model_dim=10, head_dim=7, ffn_dim=11, dropout=0.2, activation="relu")
    encoder = model.encoder(AttentionSpec(name="softmax"), max_len=5)
    for name in ("num_layers", "num_heads", "model_dim", "head_dim", "ffn_dim", "dropout", "activation"):
        assert getattr(encoder, name) == getattr(model, name)
    assert (encoder.max_len, encoder.rotary, encoder.attention.name) == (6, False, "softmax")
