"""Rotary positions in layers and models: every attention gets rotated queries and keys, step by step as all at once."""

import pytest
import torch
from support import build, small_options

import klformer
from klformer.models import (
    AttentionSpec,
    EncoderConfig,
    InputShape,
    ModelConfig,
    TransformerDecoder,
    TransformerEncoder,
)
from klformer.models.build import build_classifier
from klformer.ops.rotary import rotate

BATCH, LENGTH, DIM = 2, 13, 22
NAMES = klformer.attention_names()
#: Those that look at queries or keys.
ROTATED = [name for name in NAMES if build(name).uses_queries or build(name).uses_keys]
DECODING = [name for name in ROTATED if build(name).supports_decoding]
every_rotated = pytest.mark.parametrize("name", ROTATED)


def config(name, **arguments):
    attention = AttentionSpec(name=name, options=small_options(name))
    sizes = {"model_dim": DIM, "num_layers": 2, "num_heads": 3, "ffn_dim": 31, "head_dim": 5, "max_len": 64}
    return EncoderConfig(**sizes | {"attention": attention, "rotary": True, "dropout": 0.0} | arguments)


def tokens(length=LENGTH):
    return torch.randn(BATCH, length, DIM, dtype=torch.float64)


def layer(name, **arguments):
    made = klformer.MultiheadAttention(
        model_dim=12, num_heads=3, max_len=64, attention=AttentionSpec(name=name, options=small_options(name)),
        rotary=True, **arguments,
    )  # fmt: skip
    return made.double()


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("cross", [False, True])
def test_steps_equal_the_whole_sequence(name, cross):
    model = TransformerDecoder(config(name, value_dim=3), cross_attention=cross).double().eval()
    x, memory = tokens(), tokens(7) if cross else None
    expected = model(x, memory)
    state = model.initial_state(BATCH, memory)
    for t in range(LENGTH):
        out, state = model.step(x[:, t : t + 1], state)
        torch.testing.assert_close(out, expected[:, t : t + 1], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", DECODING)
def test_a_prompt_is_absorbed_at_its_positions(name):
    attention, x = layer(name, causal=True).eval(), torch.randn(BATCH, LENGTH, 12, dtype=torch.float64)
    whole = attention(x)
    state = attention.absorb(attention.absorb(attention.initial_state(BATCH), x[:, :4]), x[:, 4:9])
    torch.testing.assert_close(attention.read(state, x[:, 8:9]), whole[:, 8:9], atol=1e-10, rtol=1e-10)
    out, state = attention.step(x[:, 9:10], state)
    torch.testing.assert_close(out, whole[:, 9:10], atol=1e-10, rtol=1e-10)


def test_nothing_is_read_before_it_is_absorbed():
    attention = layer("softmax", causal=True)
    with pytest.raises(ValueError, match="3 tokens read from a state that has absorbed 0"):
        attention.read(attention.initial_state(BATCH), torch.zeros(BATCH, 3, 12, dtype=torch.float64))


@every_rotated
def test_padding_changes_nothing(name):
    model = TransformerEncoder(config(name)).double().eval()
    x = tokens()
    padded = torch.cat([x, torch.full((BATCH, 5, DIM), 1e3, dtype=torch.float64)], dim=1)
    key_mask = torch.arange(LENGTH + 5).expand(BATCH, -1) < LENGTH
    torch.testing.assert_close(model(padded, key_mask=key_mask)[:, :LENGTH], model(x), atol=1e-10, rtol=1e-10)


def in_front(x):
    """Tokens with others in front of them, 0, 2 and 5 in a batch of three, and their mask."""
    place, first = torch.arange(x.shape[1] + 5), torch.tensor([[0], [2], [5]])
    mask = (place >= first) & (place < first + x.shape[1])
    padded = x.new_full((*mask.shape, x.shape[2]), 1e3)
    padded[mask] = x.flatten(0, 1)
    return padded, mask


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_padding_in_front_changes_nothing(name, causal):
    model = TransformerEncoder(config(name), causal=causal).double().eval()
    x = torch.randn(3, LENGTH, DIM, dtype=torch.float64)
    padded, mask = in_front(x)
    torch.testing.assert_close(model(padded, key_mask=mask)[mask], model(x).flatten(0, 1), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", DECODING)
def test_a_prompt_with_padding_in_front_goes_on_where_it_ends(name):
    attention, x = layer(name, causal=True).eval(), torch.randn(3, LENGTH, 12, dtype=torch.float64)
    prompt, mask = in_front(x[:, :9])
    whole = attention(x)
    state = attention.absorb(attention.initial_state(3), prompt, key_mask=mask)
    torch.testing.assert_close(attention.read(state, x[:, 8:9]), whole[:, 8:9], atol=1e-10, rtol=1e-10)
    for t in range(9, LENGTH):
        out, state = attention.step(x[:, t : t + 1], state)
        torch.testing.assert_close(out, whole[:, t : t + 1], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_classifier_counts_positions_from_the_first_token(positions, pooling):
    sizes = ModelConfig(model_dim=12, num_layers=2, num_heads=2, ffn_dim=16, positions=positions, pooling=pooling)
    model = build_classifier(sizes, AttentionSpec(name="gmm-prf"), InputShape(20, vocab_size=7), num_outputs=2).eval()
    tokens = torch.randint(1, 7, (1, 9))
    padded = torch.cat([tokens.new_zeros(1, 4), tokens, tokens.new_zeros(1, 3)], 1)
    torch.testing.assert_close(model(padded, padded > 0), model(tokens), atol=1e-5, rtol=1e-5)


@every_rotated
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_the_last_layer_can_leave_out_what_nobody_asks_for(name, num_outputs):
    model = TransformerEncoder(config(name)).double()
    x = tokens()
    whole, part = model(x)[:, :num_outputs], model(x, num_outputs=num_outputs)
    torch.testing.assert_close(part, whole, atol=1e-10, rtol=1e-10)


@every_rotated
def test_the_mechanism_gets_rotated_queries_and_keys(name):
    attention, seen = layer(name), []
    attention.mechanism.register_forward_pre_hook(lambda _, operands: seen.extend(operands))
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64)
    attention(x).square().sum().backward()
    for projection, operand in zip((attention.query, attention.key), seen, strict=False):
        if projection is not None:
            heads = projection(x).view(BATCH, LENGTH, 3, 4).transpose(1, 2)
            torch.testing.assert_close(operand, rotate(heads), atol=1e-14, rtol=0)
            assert projection.weight.grad.isfinite().all()
            assert projection.weight.grad.abs().max() > 0


def test_softmax_sees_where_tokens_are_only_relative_to_each_other():
    """Tokens in front that are masked shift all positions; the others' results stay."""
    attention = layer("softmax")
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64)
    shifted = torch.cat([torch.randn(BATCH, 6, 12, dtype=torch.float64), x], dim=1)
    key_mask = torch.arange(LENGTH + 6).expand(BATCH, -1) >= 6
    torch.testing.assert_close(attention(shifted, key_mask=key_mask)[:, 6:], attention(x), atol=1e-12, rtol=1e-12)
    order = torch.randperm(LENGTH)
    assert not torch.allclose(attention(x[:, order]), attention(x)[:, order])


@pytest.mark.parametrize("name", DECODING)
def test_another_sequence_is_attended_to_without_positions(name):
    model = TransformerDecoder(config(name), cross_attention=True).double().eval()
    x, memory = tokens(), tokens(7)
    torch.testing.assert_close(model(x, memory), model(x, memory.flip(1)), atol=1e-10, rtol=1e-10)


def test_where_rotation_has_no_meaning_it_is_refused():
    with pytest.raises(ValueError, match="'synthesizer' looks at neither queries nor keys"):
        TransformerEncoder(config("synthesizer"))
    with pytest.raises(ValueError, match="head_dim of at least 2, got 1"):
        TransformerEncoder(config("softmax", head_dim=1))


def test_a_rotary_model_adds_no_positions_and_still_tells_orders_apart():
    sizes = ModelConfig(positions="rotary", dropout=0.0, num_layers=1)
    model = build_classifier(sizes, AttentionSpec(name="gmm-prf"), InputShape(20, vocab_size=9), num_outputs=3).eval()
    assert model.embedding.positions is None
    assert all(layer.self_attention.rotary for layer in model.encoder.layers)
    inputs = torch.arange(1, 9).expand(1, -1)
    assert not torch.allclose(model(inputs), model(inputs.flip(1)), atol=1e-6)


def test_a_rotary_layer_compiles_whole():
    torch._dynamo.reset()
    attention = layer("gmm-rks", causal=True)
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), attention(x), atol=1e-10, rtol=1e-10)
