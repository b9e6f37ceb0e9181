"""Encoder, decoder, embeddings and heads."""

import pytest
import torch
from support import build, small_options

import klformer
from klformer.models import (
    AttentionSpec,
    ClassifierHead,
    EncoderConfig,
    PairClassifier,
    PairClassifierHead,
    SequenceClassifier,
    SequenceEmbedding,
    TransformerDecoder,
    TransformerEncoder,
)
from klformer.models.embeddings import sinusoidal_positions

NAMES = klformer.attention_names()
BATCH, LENGTH, MEMORY, DIM = 2, 13, 7, 22
DECODING = [name for name in NAMES if build(name).supports_decoding]
every_attention = pytest.mark.parametrize("name", NAMES)


def small_model(name):
    return {
        "model_dim": DIM,
        "num_layers": 2,
        "num_heads": 3,
        "ffn_dim": 31,
        "head_dim": 5,
        "max_len": 64,
        "attention": spec(name),
    }


def spec(name):
    return AttentionSpec(name=name, options=small_options(name))


def encoder(name="gmm-rks", **arguments):
    return TransformerEncoder(EncoderConfig(**small_model(name) | arguments))


def decoder(name="gmm-rks", *, cross_attention=False, **arguments):
    return TransformerDecoder(EncoderConfig(**small_model(name) | arguments), cross_attention=cross_attention)


@every_attention
def test_padding_changes_nothing(name):
    model = encoder(name).double().eval()
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    padded = torch.cat([x, torch.full((BATCH, 5, DIM), 1e3, dtype=torch.float64)], dim=1)
    key_mask = torch.arange(LENGTH + 5).expand(BATCH, -1) < LENGTH
    torch.testing.assert_close(model(padded, key_mask=key_mask)[:, :LENGTH], model(x), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("cross", [False, True])
def test_steps_equal_the_whole_sequence(name, cross):
    model = decoder(name, cross_attention=cross, value_dim=3).double().eval()
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    memory = torch.randn(BATCH, MEMORY, DIM, dtype=torch.float64) if cross else None
    memory_mask = (torch.arange(MEMORY) < 4).expand(BATCH, -1) if cross else None
    expected = model(x, memory, memory_mask=memory_mask)
    state = model.initial_state(BATCH, memory, memory_mask=memory_mask)
    for t in range(LENGTH):
        out, state = model.step(x[:, t : t + 1], state)
        torch.testing.assert_close(out, expected[:, t : t + 1], atol=1e-9, rtol=1e-9)


@every_attention
def test_checkpointed_layers_give_the_same_gradients(name):
    plain = encoder(name, dropout=0.0).double()
    saving = encoder(name, dropout=0.0, checkpoint_layers=True).double()
    saving.load_state_dict(plain.state_dict())
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    for model in (plain, saving):
        model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=1e-10)


def test_checkpointed_layers_keep_less_for_backward():
    def kept(checkpoint_layers):
        sizes = []
        model = encoder(num_layers=4, checkpoint_layers=checkpoint_layers)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(torch.randn(BATCH, 64, DIM, requires_grad=True))
        return sum(sizes)

    assert kept(True) < kept(False) / 3


def test_head_and_value_sizes_are_free():
    layer = klformer.MultiheadAttention(model_dim=10, num_heads=3, head_dim=7, value_dim=2, attention="fastfood-prf")
    assert layer(torch.randn(2, 5, 10), torch.randn(2, 9, 10)).shape == (2, 5, 10)
    with pytest.raises(ValueError, match="model_dim=10 is not a multiple of num_heads=3; give head_dim"):
        klformer.MultiheadAttention(model_dim=10, num_heads=3)


def test_an_attention_that_cannot_decode_is_refused_when_built():
    with pytest.raises(ValueError, match="'linformer' has no causal form"):
        decoder("linformer")
    with pytest.raises(ValueError, match="'local' can't attend to another sequence"):
        decoder("local", cross_attention=True)
    with pytest.raises(ValueError, match="LocalAttention can't decode step by step"):
        decoder("local").initial_state(BATCH)


@pytest.mark.parametrize("name", [name for name in NAMES if build(name).supports_causal and name not in DECODING])
def test_causal_layers_do_not_look_ahead(name):
    model = decoder(name).double().eval()
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    changed = torch.cat([x[:, :6], torch.randn_like(x[:, 6:])], dim=1)
    torch.testing.assert_close(model(changed)[:, :6], model(x)[:, :6], atol=1e-10, rtol=1e-10)


@every_attention
def test_layers_take_nothing_at_all(name):
    layer = klformer.MultiheadAttention(model_dim=12, num_heads=3, attention=spec(name), max_len=9)
    for shape in ((0, 5, 12), (2, 0, 12)):
        out = layer(torch.zeros(shape))
        assert out.shape == shape
        out.sum().backward()


def test_other_keys_are_refused_even_if_they_are_as_many():
    layer = klformer.MultiheadAttention(model_dim=12, num_heads=3, attention="local")
    with pytest.raises(ValueError, match="LocalAttention can't attend to another sequence"):
        layer(torch.zeros(1, 5, 12), torch.zeros(1, 5, 12))


def test_no_projection_is_made_for_what_is_not_used():
    def projections(attention):
        layer = klformer.MultiheadAttention(model_dim=12, num_heads=3, attention=attention, max_len=9)
        assert layer(torch.randn(2, 7, 12)).shape == (2, 7, 12)
        return [layer.query is not None, layer.key is not None]

    assert projections("softmax") == [True, True]
    assert projections("reformer") == [True, False]
    assert projections("synthesizer") == [False, False]
    assert projections("synthesizer:variant=dense") == [True, False]


@every_attention
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_the_last_layer_can_leave_out_what_nobody_asks_for(name, num_outputs):
    model = encoder(name, dropout=0.0).double()
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    key_mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    key_mask[1, 8:] = False
    whole, part = model(x, key_mask=key_mask)[:, :num_outputs], model(x, key_mask=key_mask, num_outputs=num_outputs)
    assert part.shape == (BATCH, num_outputs, DIM)
    torch.testing.assert_close(part, whole, atol=1e-10, rtol=1e-10)
    for a, b in zip(*(torch.autograd.grad(y.sum(), model.parameters()) for y in (whole, part)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_outputs_are_not_counted_from_the_end():
    with pytest.raises(ValueError, match="num_outputs must be at least 0, got -1"):
        encoder("gmm-prf")(torch.randn(1, 5, DIM), num_outputs=-1)


def test_decoder_wants_its_memory():
    with pytest.raises(ValueError, match="memory must be given"):
        decoder(cross_attention=True)(torch.randn(1, 3, DIM))
    with pytest.raises(ValueError, match="memory must be None"):
        decoder()(torch.randn(1, 3, DIM), torch.randn(1, 3, DIM))


@every_attention
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_classifier_ignores_padding_and_learns(name, positions):
    embedding = SequenceEmbedding(model_dim=DIM, max_len=40, vocab_size=11, positions=positions)
    model = SequenceClassifier(
        embedding, encoder(name, dropout=0.0), ClassifierHead(model_dim=DIM, hidden_dim=9, num_outputs=4)
    )
    tokens = torch.randint(1, 11, (BATCH, LENGTH))
    key_mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    key_mask[1, 8:] = False
    scores = model(tokens, key_mask)
    assert scores.shape == (BATCH, 4)
    model.eval()
    alone = model(tokens[1:, :8])
    torch.testing.assert_close(model(tokens, key_mask)[1:], alone, atol=1e-4, rtol=1e-4)
    scores.square().sum().backward()
    assert model.embedding.cls_token.grad.abs().max() > 0


@pytest.mark.parametrize(("features", "width"), [("concat", 2 * DIM), ("difference", 3 * DIM)])
def test_the_classifier_of_a_pair_sees_both_vectors_and_if_asked_their_difference(features, width):
    head = PairClassifierHead(model_dim=DIM, hidden_dim=8, num_outputs=2, pair_features=features)
    seen = []
    head.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    first, second = torch.randn(2, BATCH, DIM)
    head(first, second)
    expected = torch.cat([first, second, (first - second).abs()], dim=-1)
    torch.testing.assert_close(seen[0], expected[:, :width])


def test_an_unknown_feature_of_pairs_is_named():
    with pytest.raises(ValueError, match="pair_features must be one of 'concat', 'difference', got 'product'"):
        PairClassifierHead(model_dim=DIM, hidden_dim=8, num_outputs=2, pair_features="product")


@every_attention
def test_pair_classifier_runs_its_encoder_twice(name):
    embedding = SequenceEmbedding(model_dim=DIM, max_len=40, input_dim=3)
    head = PairClassifierHead(model_dim=DIM, hidden_dim=8, num_outputs=2)
    model = PairClassifier(embedding, encoder(name), head)
    first, second = torch.randn(BATCH, 5, 3), torch.randn(BATCH, 9, 3)
    scores = model(first, second, second_mask=torch.arange(9).expand(BATCH, -1) < 6)
    assert scores.shape == (BATCH, 2)
    scores.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_embedding_with_an_offset_continues_the_sequence():
    embedding = SequenceEmbedding(model_dim=DIM, max_len=9, vocab_size=5, cls=False).eval()
    tokens = torch.randint(0, 5, (BATCH, 9))
    whole, _ = embedding(tokens)
    first, _ = embedding(tokens[:, :4])
    rest, _ = embedding(tokens[:, 4:], offset=4)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)
    with pytest.raises(ValueError, match="sequence of 10 tokens is longer than max_len=9"):
        embedding(torch.zeros(1, 10, dtype=torch.long))
    with pytest.raises(ValueError, match="offset is for decoding, which has no CLS token"):
        SequenceEmbedding(model_dim=DIM, max_len=9, vocab_size=5)(tokens[:, :1], offset=3)


def test_sinusoidal_positions():
    table = sinusoidal_positions(5, 7)
    assert table.shape == (5, 7)
    assert table[3, 0].item() == pytest.approx(0.14112, abs=1e-5)  # sin 3
    assert table[3, 3].item() == pytest.approx(torch.tensor(3 * 10_000 ** (-2 / 7)).cos().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequenceEmbedding(model_dim=4, max_len=4), "give either vocab_size or input_dim"),
        (lambda: SequenceEmbedding(model_dim=4, max_len=4, vocab_size=3, positions="some"), "positions must be one of"),
        (lambda: encoder(dropout=1.0), "dropout: Input should be less than 1, got 1.0"),
        (lambda: encoder(activation="tanh"), "activation: Input should be 'gelu' or 'relu', got 'tanh'"),
        (lambda: encoder(num_layers=0), "num_layers: Input should be greater than or equal to 1, got 0"),
        (lambda: encoder(ffn_dim=0), "ffn_dim: Input should be greater than or equal to 1, got 0"),
        (lambda: ClassifierHead(model_dim=4, hidden_dim=4, num_outputs=0), "num_outputs must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_a_compiled_encoder_trains_like_a_plain_one(tmp_path, monkeypatch):
    # The compiler's cache on disk does not know when the shapes that an operator returns have changed.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model = encoder("gmm-prf", dropout=0.0, num_layers=1)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(BATCH, LENGTH, DIM)
    model(x).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled(x).square().sum().backward()
    for gradient, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, gradient, atol=1e-3, rtol=1e-3)
