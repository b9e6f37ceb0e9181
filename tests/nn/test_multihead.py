"""What users of torch.nn.MultiheadAttention type."""

import copy

import pytest
import torch

import klformer
import klformer.nn
from klformer.errors import ArgumentError
from klformer.models import EncoderConfig


def pair(**options):
    """Torch's module, and ours with softmax inside and the same weights."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(8, 2, dtype=torch.float64, **options)
    if theirs.in_proj_bias is not None:
        torch.nn.init.normal_(theirs.in_proj_bias)
    return theirs, klformer.nn.MultiheadAttention.from_torch(theirs, attention="softmax")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
def test_softmax_is_torchs_own(bias, batch_first, padding):
    theirs, ours = pair(bias=bias, batch_first=batch_first)
    q, k, v = torch.randn(3, 3, 5, 8, dtype=torch.float64)
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = torch.tensor([[False] * 5, [False, True, False, True, True], [True, False, False, False, False]])
    if padding == "float":
        ours = klformer.nn.MultiheadAttention.from_torch(theirs, attention="gmm-prf:num_frequencies=8")
        dropped = torch.zeros(3, 5, dtype=torch.float64).masked_fill(mask, -torch.inf)
        torch.testing.assert_close(ours(q, k, v, dropped)[0], ours(q, k, v, mask)[0])
        return
    given = None if padding == "none" else mask
    expected, _ = theirs(q, k, v, given, need_weights=False)
    found, weights = ours(q, k, v, given)
    assert weights is None
    torch.testing.assert_close(found, expected)


def test_causal_and_without_a_batch():
    theirs, ours = pair()
    x = torch.randn(5, 8, dtype=torch.float64)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    expected, _ = theirs(x, x, x, attn_mask=mask, need_weights=False)
    for found in (ours(x, x, x, attn_mask=mask), ours(x, x, x, is_causal=True), ours(x, x, x, attn_mask=mask < 0)):
        torch.testing.assert_close(found[0], expected)


def test_a_kernel_takes_its_place_and_learns():
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    ours = klformer.nn.MultiheadAttention.from_torch(theirs, attention="gmm-rks:num_frequencies=8")
    x = torch.randn(2, 7, 8)
    ours(x, x, x)[0].square().sum().backward()
    assert all(p.grad is not None for p in ours.parameters())
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
    assert ours.in_proj_weight is not theirs.in_proj_weight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"need_weights": True}, "need_weights=True asks for all weights, which are never made"),
        ({"attn_mask": torch.zeros(5, 5)}, "attn_mask must be the causal mask, or None"),
        ({"attn_mask": torch.ones(4, 4).triu(1).bool()}, "attn_mask must be the causal mask"),
    ],
)
def test_what_does_not_factorise_is_refused(options, message):
    x = torch.randn(5, 2, 8)
    with pytest.raises(ArgumentError, match=message):
        klformer.nn.MultiheadAttention(8, 2)(x, x, x, **options)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 3}, {"dropout": 0.1}])
def test_what_there_is_no_counterpart_of_is_refused(options):
    with pytest.raises(ArgumentError, match=f"^{next(iter(options))} "):
        klformer.nn.MultiheadAttention(8, 2, **options)


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (torch.zeros(2, 6, dtype=torch.bool), r"torch.bool of shape \(2, 6\)"),
        (torch.zeros(7, 2, dtype=torch.bool), r"torch.bool of shape \(7, 2\)"),
        (torch.zeros(2, 7, dtype=torch.long), r"torch.int64 of shape \(2, 7\)"),
    ],
)
def test_masks_are_explained_as_torch_means_them(mask, found):
    ours, x = klformer.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 7, 8)
    wanted = r"key_padding_mask must have shape \(2, 7\), bool \(True = drop\) or floating-point \(-inf = drop\), got "
    with pytest.raises(ArgumentError, match=wanted + found):
        ours(x, x, x, mask)


def test_weights_of_keys_are_for_attentions_that_have_them():
    ours = klformer.nn.MultiheadAttention(8, 2, batch_first=True, attention="local")
    with pytest.raises(ArgumentError, match="key_padding_mask must be 0 or -inf for LocalAttention"):
        ours(*[torch.randn(2, 7, 8)] * 3, torch.ones(2, 7))


@pytest.mark.parametrize("attention", ["softmax", "local", "gmm-prf:num_frequencies=8"])
@pytest.mark.parametrize("training", [False, True])
def test_layers_of_torch_hold_it(attention, training):
    """Also in evaluation mode, where torch's layers compute softmax from the weights if they are let."""
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    ours = copy.deepcopy(theirs)
    ours.self_attn = klformer.nn.MultiheadAttention.from_torch(theirs.self_attn, attention=attention)
    theirs, ours = (torch.nn.TransformerEncoder(each, 2, enable_nested_tensor=False) for each in (theirs, ours))
    for module in (*theirs.modules(), *ours.modules()):
        if isinstance(module, torch.nn.Dropout | torch.nn.MultiheadAttention):
            setattr(module, "p" if isinstance(module, torch.nn.Dropout) else "dropout", 0.0)
    theirs.train(training)
    ours.train(training)
    x, padding = torch.randn(3, 7, 8), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(7)
    for given in ({}, {"src_key_padding_mask": padding}, {"mask": causal}):
        expected, found = theirs(x, **given), ours(x, **given)
        kept = ~padding if "src_key_padding_mask" in given else torch.ones_like(padding)
        same = torch.allclose(found[kept], expected[kept], atol=1e-5)
        assert same == (attention in ("softmax", "local"))
        if not given:
            assert torch.allclose(ours(x[:, :1]), theirs(x[:, :1]), atol=1e-5), "of one token attention is its value"


def test_shapes_are_named():
    mha = klformer.nn.MultiheadAttention(8, 2)
    with pytest.raises(ArgumentError, match=r"key must have the shape \(L, B, 8\), got \(5, 2, 9\)"):
        mha(torch.randn(5, 2, 8), torch.randn(5, 2, 9), torch.randn(5, 2, 8))


def test_an_encoder_may_be_causal():
    sizes = {"model_dim": 8, "num_layers": 2, "num_heads": 2, "ffn_dim": 8, "dropout": 0.0}
    encoder = klformer.TransformerEncoder(EncoderConfig(**sizes, attention="gmm-prf:num_frequencies=8"), causal=True)
    x = torch.randn(2, 9, 8)
    changed = torch.cat([x[:, :5], torch.randn(2, 4, 8)], 1)
    before, after = encoder.eval()(x), encoder(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    torch.testing.assert_close(encoder(x, num_outputs=3), before[:, :3])
    with pytest.raises(ArgumentError, match="'linformer' has no causal form"):
        klformer.TransformerEncoder(EncoderConfig(**sizes, max_len=9, attention="linformer"), causal=True)
